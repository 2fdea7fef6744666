"""Mamba-2: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import NormLengths
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.convolution_sizes import MatrixStateSizes
from edgeinfer_kernels.sizes.cuda_matrices import taken

PROMPT_CHUNK = 64
"""Positions of a prompt that a GPU evaluates together."""


@dataclass(frozen=True)
class Mamba2Spec(RecurrentSpec):
    """A state space model (SSD) whose state S (state_size, head_dim) of each head decays by one number.

    z, xBC, dt = W_in h; x, B, C = silu(conv(xBC) + bias); Δ = softplus(dt + bias):
    S ← e^(Δ a) S + B (Δ x)ᵀ; y = Sᵀ C + d x. The result is W_out norm(y · silu(z)), where the norm is that of
    each of `groups` equal parts; without weights of the norm, W_out (y · silu(z)).

    Head i reads B and C of group i // (heads / groups).
    """

    kind: ClassVar[str] = "mamba2"
    takes_trees: ClassVar[bool] = True

    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int
    norm: NormSpec
    slots: int = 2

    @property
    def inner_size(self) -> int:
        """Elements of x."""
        return self.heads * self.head_dim

    @property
    def result_width(self) -> int:
        return self.inner_size

    @property
    def group_width(self) -> int:
        """Elements that are normalized together."""
        return self.inner_size // self.groups

    @property
    def channels(self) -> int:
        """Elements of x, B and C together."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: x, B and C before the convolution, Δ. Matrix: (heads, head_dim / 16, state_size, 16), sixteen
        columns of S after each other.
        """
        width = padded(self.channels)
        matrix = self.inner_size * self.state_size
        return RecurrentShape(
            self.taps - 1, width, width + padded(self.heads), matrix, self.slots, self.state_size
        )

    def chunks(self, tokens: int) -> int:
        """The largest number of chunks of PROMPT_CHUNK positions, with pending ones before `tokens`."""
        return -(-(tokens + RING_ROWS) // PROMPT_CHUNK)

    def chunk_states(self, tokens: int) -> int:
        """Elements of the states before all chunks."""
        return self.chunks(tokens) * self.inner_size * self.state_size

    def read(self, tensors: TensorReader) -> "Mamba2Weights":
        width, inner, channels = tensors.hidden_size, self.inner_size, self.channels
        whole = tensors.matrix("ssm_in", inner + channels + self.heads, width)
        taps = tensors.required("ssm_conv1d.weight", channels * self.taps)
        return Mamba2Weights(
            z=whole.take_rows(0, inner),
            xbc=whole.take_rows(inner, inner + channels),
            dt=whole.take_rows(inner + channels, whole.rows),
            output=tensors.matrix("ssm_out", width, inner),
            taps=taps.reshape(channels, self.taps).T,
            taps_bias=tensors.vector("ssm_conv1d.bias", channels),
            a=tensors.required("ssm_a", self.heads),
            d=tensors.required("ssm_d", self.heads),
            dt_bias=tensors.required("ssm_dt.bias", self.heads),
            norm=tensors.vector("ssm_norm.weight", inner),
        )

    def sizes(self, weights: "Mamba2Weights", norms: NormLengths) -> "Mamba2Sizes":
        *projections, output = map(MatrixSize.of, weights.matrices())
        vectors = (self.channels * self.taps, *(3 * (self.heads,)))
        optional = vector_lengths(weights.taps_bias, weights.norm)
        return Mamba2Sizes(self, tuple(projections), output, (*vectors, *optional, *norms.vectors))


@dataclass(frozen=True)
class Mamba2Weights(BlockWeights):
    """The weights of a Mamba-2 block: the row ranges of its first projection, and the projection back. taps:
    (taps, channels), the last for the token itself. norm (inner_size,): the groups after each other.
    """

    kind: ClassVar[str] = "mamba2"

    z: Matrix
    xbc: Matrix
    dt: Matrix
    output: Matrix
    taps: Vector
    a: Vector
    d: Vector
    dt_bias: Vector
    taps_bias: Vector | None = None
    norm: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return [self.z, self.xbc, self.dt, self.output]


@dataclass(frozen=True)
class Mamba2Sizes(MatrixStateSizes):
    """The sizes of a Mamba-2 block."""

    label: ClassVar[str] = "mamba2"

    spec: Mamba2Spec

    def state_operations(self, tokens: int, start: int) -> float:
        """The update of each head's state, its product with C, and the convolution."""
        spec = self.spec
        return 2 * tokens * (2 * spec.inner_size * spec.state_size + spec.channels * spec.taps)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["Mamba2Sizes"], chunk: int, hidden_size: int) -> int:
        """With the states before all chunks."""
        states = max(block.spec.chunk_states(chunk) for block in blocks)
        return super().prompt_bytes(blocks, chunk, hidden_size) + taken(states, 4)
