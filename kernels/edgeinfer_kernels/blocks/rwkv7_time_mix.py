"""The time mixing of RWKV-7: specification, weights and sizes of one block."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.block import NormLengths, RecurrentSizes, RecurrentSpec, TensorReader
from edgeinfer_kernels.cpu.runtime.abi import ROWS_SCRATCH, quantized_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape

MIXED = ("r", "w", "k", "v", "a", "g")
"""The inputs that are interpolated with those of the token before, in the order of the file."""


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
        return RecurrentShape(1, width, 6 * width, self.width * self.head_dim, self.slots)

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
        return Rwkv7TimeMixSizes(self, tuple(map(MatrixSize.of, weights.matrices())))


@dataclass(frozen=True)
class Rwkv7TimeMixWeights:
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

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class Rwkv7TimeMixSizes(RecurrentSizes):
    """The sizes of a time mixing."""

    label: ClassVar[str] = "time mixing"

    spec: Rwkv7TimeMixSpec
    each: tuple[MatrixSize, ...]

    def undivided(self) -> list[MatrixSize]:
        return list(self.each)

    def undivided_device_bytes(self) -> int:
        raise no_gpu_kernel()

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

    def cpu_scratch(self) -> int:
        return ROWS_SCRATCH

    def inputs(self) -> list[MatrixSize]:
        return list(self.each[:3])

    def outputs(self) -> list[MatrixSize]:
        return [self.each[-1]]

    def streamed_vector_bytes(self) -> int:
        raise no_gpu_kernel()


def no_gpu_kernel() -> UnsupportedOnDeviceError:
    """Why the blocks of RWKV-7 can't be on a GPU."""
    return UnsupportedOnDeviceError("RWKV-7 has no GPU kernels; it runs on the CPU")
