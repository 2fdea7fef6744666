"""The input of a draft head, a token and a hidden state of its target: specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.sizes.cuda_matrices import activation_bytes, matrix_bytes, taken, vector_bytes

STATES = "target states"
"""The buffer of the hidden states, which `Backend.set_hidden` writes."""
PAIR = "draft pair"
HEAD_BATCH = 64
"""Maximum tokens of a step of a draft head."""


@dataclass(frozen=True)
class DraftInputSpec(StatelessSpec):
    """x ← W · [norm(x); norm(h)], as the sum of x and a difference: the first block of a draft head's layer.

    x: the embedding of a token. h: the hidden state before it after a final norm, which is the target's, or
    the head's own for a token after a drafted one. `raw_states`: before the norm.
    """

    kind: ClassVar[str] = "embedding.draft_input"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    raw_states: bool = False

    def read(self, tensors: TensorReader) -> "DraftInputWeights":
        width = tensors.hidden_size
        return DraftInputWeights(
            tensors.matrix("nextn.eh_proj", width, 2 * width),
            tensors.required("nextn.enorm.weight", width),
            tensors.required("nextn.hnorm.weight", width),
        )

    def sizes(self, weights: "DraftInputWeights", norms: NormLengths) -> "DraftInputSizes":
        return DraftInputSizes(MatrixSize.of(weights.eh_proj))


@dataclass(frozen=True)
class DraftInputWeights(BlockWeights):
    """The weights, by GGUF name: W and the norms of x and of h."""

    kind: ClassVar[str] = "embedding.draft_input"

    eh_proj: Matrix
    enorm: Vector
    hnorm: Vector

    def matrices(self) -> list[Matrix]:
        return [self.eh_proj]


@dataclass(frozen=True)
class DraftInputSizes(BlockSizes):
    """The sizes of the projection of a pair."""

    label: ClassVar[str] = "draft input"

    eh_proj: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.eh_proj]

    def undivided_device_bytes(self) -> int:
        return matrix_bytes(self.eh_proj) + self.streamed_vector_bytes()

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        # The second half of a pair begins where the first ends, and is padded by itself.
        pair = padded(self.eh_proj.columns) + 16
        return {
            STATES: 4 * padded(hidden_size),
            PAIR: 4 * pair,
            f"{PAIR}.quantized": quantized_bytes(pair),
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.eh_proj]

    def outputs(self) -> list[MatrixSize]:
        return []

    @classmethod
    def step_bytes(cls, blocks: Sequence["DraftInputSizes"], step: StepShape) -> int:
        pair = activation_bytes(step.tokens, 2 * step.hidden_size, step.input_floats)
        return pair + taken((1 + step.tokens) * step.hidden_size, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(chunk * 2 * hidden_size, chunk, chunk * hidden_size)

    def streamed_vector_bytes(self) -> int:
        return vector_bytes((self.eh_proj.rows, self.eh_proj.rows))
