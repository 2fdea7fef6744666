"""The time mixing of RWKV-7: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from edgeinfer_kernels.blocks.common.block import BlockWeights, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSizes, RecurrentSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)

MIXED = ("r", "w", "k", "v", "a", "g")
"""The inputs that are interpolated with those of the token before, in the order of the file."""
VECTORS = 8
"""Vectors of the hidden size: w0, a0, v0, k_k, k_a, r_k, and the norm of the heads with its bias."""


@dataclass(frozen=True)
class Rwkv7TimeMixSpec(RecurrentSpec):
    """Linear attention whose state S (head_dim, head_dim) of each head has a decay for each key element.

    With x_i = h + μ_i (h₋₁ - h) for each of `MIXED`: r, k, v are products of them;
    w = exp(-e^-½ sigmoid(w₀ + W₂ tanh(W₁ x_w))), a = sigmoid(a₀ + A₂ A₁ x_a), g = G₂ sigmoid(G₁ x_g);
    v ← v + (v_first - v) sigmoid(v₀ + V₂ V₁ x_v), where v_first is that of the first layer;
    κ = k · k_k with length 1; k ← k + k · k_a (a - 1).
    S ← S diag(w) - (S κ) (κ a)ᵀ + v kᵀ; o = norm(S r) + v (r · r_k · k); the result is W_out (o · g).

    The norm is a layer norm of each head with ε `head_epsilon`. `ranks`: of W₁, A₁, V₁ and G₁. `is_first`: of
    the first layer.
    """

    kind: ClassVar[str] = "rwkv7_time_mix"

    width: int
    head_dim: int
    ranks: tuple[int, int, int, int]
    is_first: bool = False
    head_epsilon: float = 64e-5
    slots: int = 2

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: h, w, k, v, κ, κ·a. Matrix: (heads, head_dim / 16, head_dim, 16), sixteen rows of S after
        each other.
        """
        width = padded(self.width)
        return RecurrentShape(1, width, 6 * width, self.width * self.head_dim, self.slots, self.head_dim)

    def read(self, tensors: TensorReader) -> "Rwkv7TimeMixWeights":
        width, (decay, rate, value, gate) = self.width, self.ranks

        def vector(name: str) -> Vector:
            return tensors.required(f"time_mix_{name}", width)

        def square(name: str) -> Matrix:
            return tensors.matrix(f"time_mix_{name}", width, width)

        def pair(name: str, rank: int) -> tuple[Matrix, Matrix]:
            first = tensors.matrix(f"time_mix_{name}1", rank, width)
            return first, tensors.matrix(f"time_mix_{name}2", width, rank)

        lerp = tensors.required("time_mix_lerp_fused.weight", len(MIXED) * width)
        w1, w2 = pair("w", decay)
        a1, a2 = pair("a", rate)
        g1, g2 = pair("g", gate)
        # A file has these of the first layer too, but nothing reads them.
        v1, v2 = pair("v", rate if self.is_first else value)
        return Rwkv7TimeMixWeights(
            receptance=square("receptance"),
            key=square("key"),
            value=square("value"),
            w1=w1,
            w2=w2,
            a1=a1,
            a2=a2,
            v1=None if self.is_first else v1,
            v2=None if self.is_first else v2,
            g1=g1,
            g2=g2,
            output=square("output"),
            lerp=lerp.reshape(len(MIXED), width),
            w0=vector("w0.weight"),
            a0=vector("a0.weight"),
            v0=vector("v0.weight"),
            k_k=vector("k_k.weight"),
            k_a=vector("k_a.weight"),
            r_k=vector("r_k.weight"),
            norm=vector("ln.weight"),
            norm_bias=vector("ln.bias"),
        )

    def sizes(self, weights: "Rwkv7TimeMixWeights", norms: NormLengths) -> "Rwkv7TimeMixSizes":
        vectors = (len(MIXED) * self.width, *VECTORS * (self.width,), *norms.vectors)
        return Rwkv7TimeMixSizes(self, tuple(map(MatrixSize.of, weights.matrices())), vectors)


@dataclass(frozen=True)
class Rwkv7TimeMixWeights(BlockWeights):
    """The weights of a time mixing. lerp: (len(MIXED), width). v1, v2: None in the first layer."""

    kind: ClassVar[str] = "rwkv7_time_mix"

    receptance: Matrix
    key: Matrix
    value: Matrix
    w1: Matrix
    w2: Matrix
    a1: Matrix
    a2: Matrix
    v1: Matrix | None
    v2: Matrix | None
    g1: Matrix
    g2: Matrix
    output: Matrix
    lerp: Vector
    w0: Vector
    a0: Vector
    v0: Vector
    k_k: Vector
    k_a: Vector
    r_k: Vector
    norm: Vector
    norm_bias: Vector

    def matrices(self) -> list[Matrix]:
        pairs = (self.w1, self.w2, self.a1, self.a2, self.v1, self.v2, self.g1, self.g2)
        low = [matrix for matrix in pairs if matrix is not None]
        return [self.receptance, self.key, self.value, *low, self.output]


@dataclass(frozen=True)
class Rwkv7TimeMixSizes(RecurrentSizes):
    """The sizes of a time mixing. `each`: its matrices in the order of `Rwkv7TimeMixWeights.matrices`.
    `vectors`: lengths of its vectors and norms.
    """

    label: ClassVar[str] = "time mixing"
    needs_whole_model: ClassVar[bool] = True

    spec: Rwkv7TimeMixSpec
    each: tuple[MatrixSize, ...]
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return list(self.each)

    def undivided_device_bytes(self) -> int:
        return sum(map(matrix_bytes, self.each)) + vector_bytes(self.vectors)

    def state_operations(self, tokens: int, start: int) -> float:
        """Three products of each head's state with a vector."""
        return 6 * tokens * self.spec.width * self.spec.head_dim

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        width = padded(self.spec.width)
        rank = padded(max(self.spec.ranks))
        mixed = {f"mixed_{name}": 4 * width for name in MIXED}
        mixed |= {f"mixed_{name}.quantized": quantized_bytes(width) for name in MIXED}
        low = {f"low_rank_{name}": 4 * rank for name in "wavg"}
        low |= {f"low_rank_{name}.quantized": quantized_bytes(rank) for name in "wavg"}
        floats = ("receptance", "first_value", "value_rate", "projected_z", "attn_out")
        return {
            "state_rows": 4 * self.spec.recurrent.row_width,
            **mixed,
            **low,
            **dict.fromkeys(floats, 4 * width),
            "attn_out.quantized": quantized_bytes(width),
        }

    def inputs(self) -> list[MatrixSize]:
        return [*self.each[:3], *self.each[3:-1:2]]

    def inner(self) -> list[MatrixSize]:
        """The matrices that read low-rank products."""
        return list(self.each[4:-1:2])

    def outputs(self) -> list[MatrixSize]:
        return [self.each[-1]]

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)

    @classmethod
    def step_bytes(cls, blocks: Sequence[Self], step: StepShape) -> int:
        """What `_row_bytes` counts, the inputs of all matrices, and the low-rank products."""
        tokens, width, ranks = step.tokens, blocks[0].spec.width, blocks[0].spec.ranks
        low = sum(activation_bytes(tokens, rank, _low_floats(blocks)) for rank in ranks)
        mixed = activation_bytes(tokens, width, has_floats(_firsts(blocks)), len(MIXED))
        conv_out = activation_bytes(tokens, width, has_floats(block.each[-1] for block in blocks))
        return (
            mixed
            + low
            + conv_out
            + taken(4 * tokens * padded_rows(max(ranks)), 4)
            + cls._row_bytes(blocks, tokens)
        )

    @classmethod
    def prompt_bytes(cls, blocks: Sequence[Self], chunk: int, hidden_size: int) -> int:
        """What `_row_bytes` counts, and the inputs of the matrices with their scales."""
        width, rank = blocks[0].spec.width, max(blocks[0].spec.ranks)
        f16 = taken(len(MIXED) * chunk * width, 2) + taken(chunk * rank, 2)
        return f16 + taken(len(MIXED) * chunk, 4) + taken(chunk, 4) + cls._row_bytes(blocks, chunk)

    @staticmethod
    def _row_bytes(blocks: "Sequence[Rwkv7TimeMixSizes]", tokens: int) -> int:
        """Rows of the state; and r, the products with V₂ and G₂, the results of the heads, and v of the first
        layer.
        """
        spec = blocks[0].spec
        return taken(tokens * spec.recurrent.row_width, 4) + 5 * taken(tokens * spec.width, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        widest = max(self.spec.width, *self.spec.ranks)
        return ChunkRows(chunk * self.spec.width, chunk, chunk * widest)


def _firsts(blocks: Sequence[Rwkv7TimeMixSizes]) -> list[MatrixSize]:
    """The matrices that read interpolated inputs."""
    return [matrix for block in blocks for matrix in block.inputs()]


def _low_floats(blocks: Sequence[Rwkv7TimeMixSizes]) -> bool:
    """Whether a matrix that reads a low-rank product is in a float format."""
    return has_floats(matrix for block in blocks for matrix in block.inner())
