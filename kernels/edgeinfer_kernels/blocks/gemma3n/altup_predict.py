"""AltUp before a layer: each stream is predicted from all; specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import NormLengths, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.stream_sizes import StreamSizes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector


@dataclass(frozen=True)
class AltUpPredictSpec(StatelessSpec):
    """P_j = S_j + Σ_i C_ji · S_i, then x ← P_0, with C = W_predict · m and m = tanh(W_router · norm(x) / d).

    A token has `streams` hidden states S of d elements. The first is x, which the blocks of a layer read and
    change; the others pass through AltUp only. Before the first layer, S_0 = x, and S_j = A_j · x with the
    length of x.
    Source: Baykal et al. 2023, "Alternating Updates for Efficient Transformers".
    """

    kind: ClassVar[str] = "gemma3n.altup_predict"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    streams: int
    is_first: bool

    def read(self, tensors: TensorReader) -> "AltUpPredictWeights":
        width, count = tensors.hidden_size, self.streams
        expand = tensors.model_experts("altup_proj", count - 1, width, width) if self.is_first else None
        return AltUpPredictWeights(
            AltUpRouter.read(tensors, count),
            tensors.required("altup_predict_coef.weight", count**3),
            tuple(expand.expert(index) for index in range(count - 1)) if expand is not None else (),
        )

    def sizes(self, weights: "AltUpPredictWeights", norms: NormLengths) -> StreamSizes:
        return StreamSizes(self.streams, tuple(map(MatrixSize.of, weights.matrices())))


@dataclass(frozen=True)
class AltUpRouter:
    """The router of m: `weight` (streams · hidden_size), the rows of W_router; `norm` (hidden_size)."""

    weight: Vector
    norm: Vector

    @classmethod
    def read(cls, tensors: TensorReader, streams: int) -> "AltUpRouter":
        width = tensors.hidden_size
        return cls(
            tensors.required("altup_router.weight", streams * width),
            tensors.required("altup_router_norm.weight", width),
        )


@dataclass(frozen=True)
class AltUpPredictWeights:
    """`coef` (streams² · streams): the rows of W_predict. `expand`: A_1…, only in the first layer."""

    kind: ClassVar[str] = "gemma3n.altup_predict"

    router: AltUpRouter
    coef: Vector
    expand: tuple[Matrix, ...] = ()

    def matrices(self) -> list[Matrix]:
        return list(self.expand)

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()
