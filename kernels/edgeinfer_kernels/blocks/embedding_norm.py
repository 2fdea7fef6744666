"""A norm of the hidden states, of the embedding or after a sum: specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import vector_bytes


@dataclass(frozen=True)
class EmbeddingNormSpec(StatelessSpec):
    """x ← norm(x), as the sum of x and norm(x) - x: the first block of the first layer, or in an encoder also
    after another block. `name`: the tensor, of the whole model or, if `in_layer`, of the layer.
    """

    kind: ClassVar[str] = "embedding_norm"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    name: str = "token_embd_norm"
    in_layer: bool = False

    def read(self, tensors: TensorReader) -> "EmbeddingNormWeights":
        width, name = tensors.hidden_size, f"{self.name}.weight"
        if not self.norm.has_weights:
            return EmbeddingNormWeights(np.ones(width, np.float32))
        if self.in_layer:
            return EmbeddingNormWeights(
                tensors.required(name, width), tensors.vector(f"{self.name}.bias", width)
            )
        bias = tensors.model_vector_or_none(f"{self.name}.bias", width)
        return EmbeddingNormWeights(tensors.model_vector(name, width), bias)

    def sizes(self, weights: "EmbeddingNormWeights", norms: NormLengths) -> "EmbeddingNormSizes":
        return EmbeddingNormSizes(vector_lengths(weights.weight, weights.bias))


@dataclass(frozen=True)
class EmbeddingNormWeights(BlockWeights):
    """The weight and the bias of the norm; None: there is no bias."""

    kind: ClassVar[str] = "embedding_norm"

    weight: Vector
    bias: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return []


@dataclass(frozen=True)
class EmbeddingNormSizes(BlockSizes):
    """The sizes of the norm: it has no matrix. `vectors`: the lengths of weight and bias."""

    label: ClassVar[str] = "embedding norm"

    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return []

    def undivided_device_bytes(self) -> int:
        return vector_bytes(self.vectors)

    def inputs(self) -> list[MatrixSize]:
        return []

    def outputs(self) -> list[MatrixSize]:
        return []

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
