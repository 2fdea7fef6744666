"""AltUp after a layer: the streams are corrected by its result; specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import NormLengths, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.stream_sizes import StreamSizes
from edgeinfer_kernels.blocks.gemma3n.altup_predict import AltUpRouter
from edgeinfer_kernels.blocks.layer_output import LayerOutputSpec, LayerOutputWeights
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector


@dataclass(frozen=True)
class AltUpCorrectSpec(StatelessSpec):
    """S_j = P_j + c_j · (x - P_0), then x ← S_0, with c = 1 + W_correct · m and m as in `AltUpPredictSpec`.

    S_1… then get y, the input from the per-layer embeddings as in `LayerOutputSpec`, with s ⊙ S_0 instead of
    x. After the last layer, x ← the mean of S_0 and all U_j · S_j, these with the length of S_0.
    """

    kind: ClassVar[str] = "gemma3n.altup_correct"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    streams: int
    output: LayerOutputSpec

    @property
    def is_last(self) -> bool:
        return self.output.layer == self.output.layers - 1

    def read(self, tensors: TensorReader) -> "AltUpCorrectWeights":
        width, count = tensors.hidden_size, self.streams
        merge = tensors.model_experts("altup_unembd_proj", count - 1, width, width) if self.is_last else None
        return AltUpCorrectWeights(
            AltUpRouter.read(tensors, count),
            tensors.required("altup_correct_coef.weight", count**2),
            tensors.required("altup_correct_scale.weight", width),
            self.output.read(tensors),
            tuple(merge.expert(index) for index in range(count - 1)) if merge is not None else (),
        )

    def sizes(self, weights: "AltUpCorrectWeights", norms: NormLengths) -> StreamSizes:
        merge = tuple(map(MatrixSize.of, weights.merge))
        return StreamSizes(self.streams, merge, self.output.sizes(weights.output, norms))


@dataclass(frozen=True)
class AltUpCorrectWeights:
    """`coef` (streams · streams): the rows of W_correct. `scale` (hidden_size): s. `merge`: U_1…, only in the
    last layer.
    """

    kind: ClassVar[str] = "gemma3n.altup_correct"

    router: AltUpRouter
    coef: Vector
    scale: Vector
    output: LayerOutputWeights
    merge: tuple[Matrix, ...] = ()

    def matrices(self) -> list[Matrix]:
        return [*self.merge, *self.output.matrices()]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()
