"""The channel mixing of RWKV-7: specification, weights and sizes of one block."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.block import NormLengths, RecurrentSizes, RecurrentSpec, TensorReader
from edgeinfer_kernels.blocks.rwkv7_time_mix import no_gpu_kernel
from edgeinfer_kernels.cpu.runtime.abi import ROWS_SCRATCH, quantized_bytes
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape


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
        return Rwkv7ChannelMixSizes(self, *map(MatrixSize.of, weights.matrices()))


@dataclass(frozen=True)
class Rwkv7ChannelMixWeights:
    """The weights of a channel mixing."""

    kind: ClassVar[str] = "rwkv7_channel_mix"

    key: Matrix
    value: Matrix
    lerp: Vector

    def matrices(self) -> list[Matrix]:
        return [self.key, self.value]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class Rwkv7ChannelMixSizes(RecurrentSizes):
    """The sizes of a channel mixing."""

    label: ClassVar[str] = "channel mixing"
    state_label: ClassVar[str] = "token shift"

    spec: Rwkv7ChannelMixSpec
    key: MatrixSize
    value: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.key, self.value]

    def undivided_device_bytes(self) -> int:
        raise no_gpu_kernel()

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        width, hidden = padded(self.spec.width), padded(self.spec.neurons)
        return {
            "state_rows": 4 * width,
            "mixed_k": 4 * width,
            "mixed_k.quantized": quantized_bytes(width),
            "hidden": 4 * hidden,
            "hidden.quantized": quantized_bytes(hidden),
        }

    def cpu_scratch(self) -> int:
        return ROWS_SCRATCH

    def inputs(self) -> list[MatrixSize]:
        return [self.key]

    def outputs(self) -> list[MatrixSize]:
        return [self.value]

    def streamed_vector_bytes(self) -> int:
        raise no_gpu_kernel()
