"""The convolution of a block of drafts after a block of its layer: specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths
from edgeinfer_kernels.blocks.embedding.convolved_input import Convolution
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector


@dataclass(frozen=True)
class ConvolvedResultSpec(StatelessSpec):
    """x ← r + convolution of (x - c), with the factors of `embedding.convolved_input`, which had the input r
    and the result c. So x - c is what the block between them has added.
    """

    kind: ClassVar[str] = "embedding.convolved_result"
    is_divisible: ClassVar[bool] = False

    convolution: Convolution

    def sizes(self, weights: "ConvolvedResultWeights", norms: NormLengths) -> "ConvolvedResultSizes":
        return ConvolvedResultSizes()


@dataclass(frozen=True)
class ConvolvedResultWeights(BlockWeights):
    """`base`: as of `ConvolvedInputWeights`."""

    kind: ClassVar[str] = "embedding.convolved_result"

    base: Vector

    def matrices(self) -> list[Matrix]:
        return []


@dataclass(frozen=True)
class ConvolvedResultSizes(BlockSizes):
    """No sizes besides those of the convolution before the block."""

    label: ClassVar[str] = "convolution"
    has_device_kernels: ClassVar[bool] = False

    def undivided(self) -> list[MatrixSize]:
        return []

    def inputs(self) -> list[MatrixSize]:
        return []

    def outputs(self) -> list[MatrixSize]:
        return []
