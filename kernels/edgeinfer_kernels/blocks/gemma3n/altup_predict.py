"""AltUp before a layer: each stream is predicted from all; specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import matrix_bytes, padded_rows, row_runs, taken, vector_bytes


@dataclass(frozen=True)
class AltUpPredictSpec(StatelessSpec):
    """P_j = S_j + Σ_i C_ji · S_i, then x ← P_0, with C = W_predict · m and m = tanh(W_router · norm(x) / d).

    A token has `streams` hidden states S of d elements, `width`. The first is x, which the blocks of a layer
    read and change; the others pass through AltUp only. Before the first layer, S_0 = x, and S_j = A_j · x
    with the length of x.
    Source: Baykal et al. 2023, "Alternating Updates for Efficient Transformers".
    """

    kind: ClassVar[str] = "gemma3n.altup_predict"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    streams: int
    width: int
    is_first: bool

    def read(self, tensors: TensorReader) -> "AltUpPredictWeights":
        width, count = tensors.hidden_size, self.streams
        expand = tensors.model_experts("altup_proj", count - 1, width, width) if self.is_first else None
        return AltUpPredictWeights(
            AltUpRouter.read(tensors, count),
            tensors.required("altup_predict_coef.weight", count**3),
            tuple(expand.expert(index) for index in range(count - 1)) if expand is not None else (),
        )

    def sizes(self, weights: "AltUpPredictWeights", norms: NormLengths) -> "AltUpPredictSizes":
        vectors = vector_lengths(weights.router.weight, weights.coef)
        return AltUpPredictSizes(self, tuple(map(MatrixSize.of, weights.expand)), vectors)


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
class AltUpPredictWeights(BlockWeights):
    """`coef` (streams² · streams): the rows of W_predict. `expand`: A_1…, only in the first layer."""

    kind: ClassVar[str] = "gemma3n.altup_predict"

    router: AltUpRouter
    coef: Vector
    expand: tuple[Matrix, ...] = ()

    def matrices(self) -> list[Matrix]:
        return list(self.expand)


@dataclass(frozen=True)
class AltUpPredictSizes(BlockSizes):
    """`expand`: the sizes of the matrices that expand x. `vectors`: lengths of the vectors on a GPU."""

    label: ClassVar[str] = "AltUp"
    needs_whole_model: ClassVar[bool] = True

    spec: AltUpPredictSpec
    expand: tuple[MatrixSize, ...] = ()
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return list(self.expand)

    def undivided_device_bytes(self) -> int:
        return sum(map(matrix_bytes, self.stacked_inputs())) + vector_bytes(self.vectors)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        return stream_buffers(self.spec.streams, hidden_size)

    def inputs(self) -> list[MatrixSize]:
        return list(self.expand)

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.expand)

    def outputs(self) -> list[MatrixSize]:
        return []

    @classmethod
    def step_bytes(cls, blocks: Sequence["AltUpPredictSizes"], step: StepShape) -> int:
        """The streams, and the products that expand x."""
        products = sum(padded_rows(matrix.rows) for block in blocks for matrix in block.stacked_inputs())
        return _stream_bytes(blocks, step.tokens) + taken(step.tokens * products, 4)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["AltUpPredictSizes"], chunk: int, hidden_size: int) -> int:
        """The streams."""
        return _stream_bytes(blocks, chunk)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(products=chunk * sum(matrix.rows for matrix in self.expand))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)


def stream_buffers(streams: int, hidden_size: int) -> dict[str, int]:
    """Bytes per token of the streams on the CPU."""
    nbytes = 4 * streams * padded(hidden_size)
    return {"streams": nbytes, "predictions": nbytes}


def _stream_bytes(blocks: Sequence[AltUpPredictSizes], tokens: int) -> int:
    """Bytes of the streams of tokens on a GPU, and of the prediction of the first one."""
    return taken((blocks[0].spec.streams + 1) * tokens * blocks[0].spec.width, 4)
