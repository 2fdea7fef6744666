"""A Medusa head, which predicts a token some positions ahead: specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockSizes, NormLengths, StatelessSpec, TensorReader
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector

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
class MedusaHeadWeights:
    """The weights: W, b and W_out."""

    kind: ClassVar[str] = "embedding.medusa_head"

    linear: Matrix
    bias: Vector
    output: Matrix

    def matrices(self) -> list[Matrix]:
        return [self.linear, self.output]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class MedusaHeadSizes(BlockSizes):
    """The sizes of a head with its output matrix."""

    label: ClassVar[str] = "Medusa head"
    has_device_kernels: ClassVar[bool] = False

    linear: MatrixSize
    output: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.linear, self.output]

    def undivided_device_bytes(self) -> int:
        return 0

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
