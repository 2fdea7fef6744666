"""Laurel, a low-rank projection in parallel with attention: specification, weights and sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)

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
        vectors = (*norms.vectors, *vector_lengths(weights.post_norm))
        return LaurelSizes(MatrixSize.of(weights.left), MatrixSize.of(weights.right), vectors)


@dataclass(frozen=True)
class LaurelWeights(BlockWeights):
    """L and R, `laurel_l` and `laurel_r`, and the weights of the norm."""

    kind: ClassVar[str] = "gemma3n.laurel"

    left: Matrix
    right: Matrix
    post_norm: Vector

    def matrices(self) -> list[Matrix]:
        return [self.left, self.right]


@dataclass(frozen=True)
class LaurelSizes(BlockSizes):
    """The sizes of Laurel's matrices. `vectors`: lengths of its norms."""

    label: ClassVar[str] = "Laurel"

    left: MatrixSize
    right: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [self.left, self.right]

    def undivided_device_bytes(self) -> int:
        return matrix_bytes(self.left) + matrix_bytes(self.right) + vector_bytes(self.vectors)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        rank = padded(self.left.rows)
        return {"hidden": 4 * rank, "hidden.quantized": quantized_bytes(rank)}

    def inputs(self) -> list[MatrixSize]:
        return [self.left]

    def outputs(self) -> list[MatrixSize]:
        return [self.right]

    @classmethod
    def step_bytes(cls, blocks: Sequence["LaurelSizes"], step: StepShape) -> int:
        """The products with L in float32 and as activations."""
        rank = max(block.left.rows for block in blocks)
        floats = has_floats(block.right for block in blocks)
        return taken(step.tokens * padded_rows(rank), 4) + activation_bytes(step.tokens, rank, floats)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(chunk * self.left.rows, chunk, chunk * max(self.left.rows, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
