"""Laurel, a low-rank projection in parallel with attention: specification, weights and sizes."""

import math
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import (
    BlockSizes,
    NormLengths,
    NormSpec,
    StatelessSpec,
    TensorReader,
)
from edgeinfer_kernels.blocks.gemma3n import CPU_ONLY
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector

SUM_SCALE = math.sqrt(0.5)


@dataclass(frozen=True)
class LaurelSpec(StatelessSpec):
    """x ← (x + h + norm(R · L · h)) / √2 with the normed h of attention, whose result x includes already.

    Source: Menghani et al. 2024, "LAuReL: Learned Augmented Residual Layer".
    """

    kind: ClassVar[str] = "gemma3n.laurel"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    rank: int

    def read(self, tensors: TensorReader) -> "LaurelWeights":
        width = tensors.hidden_size
        return LaurelWeights(
            tensors.matrix("laurel_l", self.rank, width),
            tensors.matrix("laurel_r", width, self.rank),
            tensors.required("laurel_post_norm.weight", width),
        )

    def sizes(self, weights: "LaurelWeights", norms: NormLengths) -> "LaurelSizes":
        return LaurelSizes(MatrixSize.of(weights.left), MatrixSize.of(weights.right))


@dataclass(frozen=True)
class LaurelWeights:
    """L and R, `laurel_l` and `laurel_r`, and the weights of the norm."""

    kind: ClassVar[str] = "gemma3n.laurel"

    left: Matrix
    right: Matrix
    post_norm: Vector

    def matrices(self) -> list[Matrix]:
        return [self.left, self.right]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class LaurelSizes(BlockSizes):
    """The sizes of Laurel's matrices."""

    label: ClassVar[str] = "Laurel"
    cpu_only: ClassVar[str] = CPU_ONLY

    left: MatrixSize
    right: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.left, self.right]

    def undivided_device_bytes(self) -> int:
        raise UnsupportedOnDeviceError(CPU_ONLY)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        rank = padded(self.left.rows)
        return {"hidden": 4 * rank, "hidden.quantized": quantized_bytes(rank)}

    def inputs(self) -> list[MatrixSize]:
        return [self.left]

    def outputs(self) -> list[MatrixSize]:
        return [self.right]
