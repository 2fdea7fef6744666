"""The learned rows of positions, which are added to the embeddings: specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths
from edgeinfer_kernels.matrix import Matrix, MatrixSize
from edgeinfer_kernels.sizes.cuda_matrices import taken


@dataclass(frozen=True)
class PositionEmbeddingSpec(StatelessSpec):
    """x += the learned row of the token's position, one of `positions`: the first block of the first layer.

    Later positions have the last row; a model's context is never longer. Keys and values depend on the
    positions, so cached tokens can't be moved to others.
    """

    kind: ClassVar[str] = "embedding.positions"
    is_divisible: ClassVar[bool] = False

    positions: int

    def read(self, tensors: TensorReader) -> "PositionEmbeddingWeights":
        return PositionEmbeddingWeights(
            tensors.model_matrix("position_embd", self.positions, tensors.hidden_size)
        )

    def sizes(self, weights: "PositionEmbeddingWeights", norms: NormLengths) -> "PositionEmbeddingSizes":
        return PositionEmbeddingSizes(weights.rows.name, weights.rows.rows, weights.rows.columns)


@dataclass(frozen=True)
class PositionEmbeddingWeights(BlockWeights):
    """`rows`: (positions, hidden_size). No matmul reads it."""

    kind: ClassVar[str] = "embedding.positions"

    rows: Matrix

    def matrices(self) -> list[Matrix]:
        return []


@dataclass(frozen=True)
class PositionEmbeddingSizes(BlockSizes):
    """The sizes of the rows, which are in memory in float32."""

    label: ClassVar[str] = "positions"

    name: str
    positions: int
    width: int

    def undivided(self) -> list[MatrixSize]:
        return [MatrixSize(self.name, "F32", self.positions, self.width)]

    def undivided_device_bytes(self) -> int:
        return taken(self.positions * self.width, 4)

    def inputs(self) -> list[MatrixSize]:
        return []

    def outputs(self) -> list[MatrixSize]:
        return []

    def streamed_vector_bytes(self) -> int:
        return self.undivided_device_bytes()
