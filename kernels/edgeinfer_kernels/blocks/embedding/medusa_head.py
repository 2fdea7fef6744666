"""A Medusa head, which predicts a token some positions ahead: specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths, StepShape
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)

HIDDEN, LOGITS = "medusa hidden", "medusa logits"
"""The buffers of the head's hidden rows, and of its logits."""


@dataclass(frozen=True)
class MedusaHeadSpec(StatelessSpec):
    """logits = W_out · (x + silu(W · x + b)), which are stored; x stays as it is.

    x: the hidden state of the target after its final norm.
    Source: Cai et al. 2024, "Medusa" (arXiv:2401.10774).
    """

    kind: ClassVar[str] = "embedding.medusa_head"
    is_divisible: ClassVar[bool] = False

    vocabulary_size: int

    def read(self, tensors: TensorReader) -> "MedusaHeadWeights":
        width = tensors.hidden_size
        return MedusaHeadWeights(
            tensors.matrix("medusa_linear", width, width),
            tensors.required("medusa_linear.bias", width),
            tensors.matrix("medusa_output", self.vocabulary_size, width),
        )

    def sizes(self, weights: "MedusaHeadWeights", norms: NormLengths) -> "MedusaHeadSizes":
        return MedusaHeadSizes(MatrixSize.of(weights.linear), MatrixSize.of(weights.output))


@dataclass(frozen=True)
class MedusaHeadWeights(BlockWeights):
    """The weights: W, b and W_out."""

    kind: ClassVar[str] = "embedding.medusa_head"

    linear: Matrix
    bias: Vector
    output: Matrix

    def matrices(self) -> list[Matrix]:
        return [self.linear, self.output]


@dataclass(frozen=True)
class MedusaHeadSizes(BlockSizes):
    """The sizes of a head with its output matrix."""

    label: ClassVar[str] = "Medusa head"

    linear: MatrixSize
    output: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.linear, self.output]

    def undivided_device_bytes(self) -> int:
        return matrix_bytes(self.linear) + matrix_bytes(self.output) + self.streamed_vector_bytes()

    def streamed_vector_bytes(self) -> int:
        return vector_bytes([self.linear.rows])

    @classmethod
    def step_bytes(cls, blocks: Sequence["MedusaHeadSizes"], step: StepShape) -> int:
        matrices = [matrix for block in blocks for matrix in block.undivided()]
        width, is_float = step.hidden_size, has_floats(matrices)
        programs = max(padded_rows(block.output.rows) // ROW_MULTIPLE for block in blocks)
        counts = (padded_rows(width), len(blocks) * programs, len(blocks) * programs)
        return 2 * activation_bytes(1, width, is_float) + sum(taken(count, 4) for count in counts)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        columns = padded(hidden_size)
        return {
            HIDDEN: 4 * columns,
            f"{HIDDEN}.quantized": quantized_bytes(columns),
            LOGITS: 4 * padded(self.output.rows),
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.linear]

    def outputs(self) -> list[MatrixSize]:
        return []
