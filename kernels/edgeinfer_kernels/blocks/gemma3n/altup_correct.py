"""AltUp after a layer: the streams are corrected by its result; specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.gemma3n.altup_predict import AltUpRouter, stream_buffers
from edgeinfer_kernels.blocks.layer_output import LayerOutputSizes, LayerOutputSpec, LayerOutputWeights
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)


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

    def sizes(self, weights: "AltUpCorrectWeights", norms: NormLengths) -> "AltUpCorrectSizes":
        merge = tuple(map(MatrixSize.of, weights.merge))
        vectors = vector_lengths(weights.router.weight, weights.coef, weights.scale)
        return AltUpCorrectSizes(self, merge, self.output.sizes(weights.output, norms), vectors)


@dataclass(frozen=True)
class AltUpCorrectWeights(BlockWeights):
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


@dataclass(frozen=True)
class AltUpCorrectSizes(BlockSizes):
    """`merge`: the sizes of the matrices that merge the streams. `output`: those of the input from the
    per-layer embeddings. `vectors`: lengths of the other vectors on a GPU.
    """

    label: ClassVar[str] = "AltUp"
    needs_whole_model: ClassVar[bool] = True

    spec: AltUpCorrectSpec
    merge: tuple[MatrixSize, ...]
    output: LayerOutputSizes
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [*self.merge, *self.output.undivided()]

    def undivided_device_bytes(self) -> int:
        own = sum(map(matrix_bytes, self.merge)) + vector_bytes(self.vectors)
        return own + self.output.undivided_device_bytes()

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        return stream_buffers(self.spec.streams, hidden_size) | self.output.cpu_buffers(hidden_size)

    def inputs(self) -> list[MatrixSize]:
        return [*self.merge, *self.output.inputs()]

    def outputs(self) -> list[MatrixSize]:
        return self.output.outputs()

    @classmethod
    def step_bytes(cls, blocks: Sequence["AltUpCorrectSizes"], step: StepShape) -> int:
        """Those of the per-layer inputs; the streams to merge as activations, and their products."""
        merge = [matrix for block in blocks for matrix in block.merge]
        streams = activation_bytes(step.tokens, step.hidden_size, has_floats(merge), len(merge))
        products = taken(step.tokens * sum(padded_rows(matrix.rows) for matrix in merge), 4)
        inputs = LayerOutputSizes.step_bytes([block.output for block in blocks], step)
        return inputs + streams + products

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["AltUpCorrectSizes"], chunk: int, hidden_size: int) -> int:
        """The per-layer inputs."""
        return LayerOutputSizes.prompt_bytes([block.output for block in blocks], chunk, hidden_size)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        inputs = self.output.chunk_rows(chunk, hidden_size)
        merged = chunk * sum(matrix.rows for matrix in self.merge)
        hidden = max(inputs.hidden, chunk * hidden_size if self.merge else 0)
        return ChunkRows(hidden, inputs.scales, max(inputs.products, merged))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors) + self.output.streamed_vector_bytes()
