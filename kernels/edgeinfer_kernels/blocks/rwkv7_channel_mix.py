"""The channel mixing of RWKV-7: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from edgeinfer_kernels.blocks.common.block import BlockWeights, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSizes, RecurrentSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSizes
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    taken,
    vector_bytes,
)


@dataclass(frozen=True)
class Rwkv7ChannelMixSpec(RecurrentSpec):
    """A feed-forward that reads the token before too: W_v relu(W_k (h + μ (h₋₁ - h)))²."""

    kind: ClassVar[str] = "rwkv7_channel_mix"

    width: int
    neurons: int
    slots: int = 2

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: h."""
        width = padded(self.width)
        return RecurrentShape(1, width, width, 0, self.slots)

    def read(self, tensors: TensorReader) -> "Rwkv7ChannelMixWeights":
        return Rwkv7ChannelMixWeights(
            tensors.matrix("channel_mix_key", self.neurons, self.width),
            tensors.matrix("channel_mix_value", self.width, self.neurons),
            tensors.required("channel_mix_lerp_k.weight", self.width),
        )

    def sizes(self, weights: "Rwkv7ChannelMixWeights", norms: NormLengths) -> "Rwkv7ChannelMixSizes":
        key, value = map(MatrixSize.of, weights.matrices())
        return Rwkv7ChannelMixSizes(self, key, value, (self.width, *norms.vectors))


@dataclass(frozen=True)
class Rwkv7ChannelMixWeights(BlockWeights):
    """The weights of a channel mixing."""

    kind: ClassVar[str] = "rwkv7_channel_mix"

    key: Matrix
    value: Matrix
    lerp: Vector

    def matrices(self) -> list[Matrix]:
        return [self.key, self.value]


@dataclass(frozen=True)
class Rwkv7ChannelMixSizes(RecurrentSizes):
    """The sizes of a channel mixing. `vectors`: lengths of its vectors and norms."""

    label: ClassVar[str] = "channel mixing"
    state_label: ClassVar[str] = "token shift"

    spec: Rwkv7ChannelMixSpec
    key: MatrixSize
    value: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [self.key, self.value]

    def undivided_device_bytes(self) -> int:
        return sum(map(matrix_bytes, self.undivided())) + vector_bytes(self.vectors)

    @property
    def feed_forward(self) -> FeedForwardSizes:
        """The matrices as a feed-forward without a gate, which multiplies them on a GPU."""
        return FeedForwardSizes(self.key, self.value)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        width, hidden = padded(self.spec.width), padded(self.spec.neurons)
        return {
            "state_rows": 4 * width,
            "mixed_k": 4 * width,
            "mixed_k.quantized": quantized_bytes(width),
            "hidden": 4 * hidden,
            "hidden.quantized": quantized_bytes(hidden),
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.key]

    def outputs(self) -> list[MatrixSize]:
        return [self.value]

    @classmethod
    def step_bytes(cls, blocks: Sequence[Self], step: StepShape) -> int:
        """The rows of the state, the input of the first matrix and that of the second."""
        width = max(block.spec.width for block in blocks)
        mixed = activation_bytes(step.tokens, width, has_floats(block.key for block in blocks))
        step = step._replace(hidden_floats=has_floats(block.value for block in blocks))
        hidden = FeedForwardSizes.step_bytes([block.feed_forward for block in blocks], step)
        return mixed + hidden + taken(step.tokens * padded(width), 4)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence[Self], chunk: int, hidden_size: int) -> int:
        """The rows of the state, and the input of the first matrix with its scales."""
        width = max(block.spec.width for block in blocks)
        return taken(chunk * padded(width), 4) + taken(chunk * width, 2) + taken(chunk, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return self.feed_forward.chunk_rows(chunk, hidden_size)

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
