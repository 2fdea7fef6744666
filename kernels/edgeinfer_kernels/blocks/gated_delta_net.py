"""Gated delta net: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import NormLengths
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.convolution_sizes import MatrixStateSizes
from edgeinfer_kernels.sizes.cuda_matrices import taken

DELTA_POSITIONS = 16
"""Positions of a prompt that a GPU evaluates together: forward substitution takes as many steps."""


@dataclass(frozen=True)
class GatedDeltaNetSpec(RecurrentSpec):
    """Linear attention whose state S (head_dim, head_dim) of each value head is updated by the delta rule.

    q, k, v = silu(conv(W_qkv h)), q and k with length 1; β = sigmoid(W_β h), g = a · softplus(W_a h + dt):
    S ← e^g S; S ← S + k (β (v - Sᵀ k))ᵀ; o = Sᵀ q / √head_dim. The result is W_out (norm(o) · silu(W_z h)).

    Value head i reads key head i mod key_heads, or if `repeats_each` i // (value_heads / key_heads). `norm`:
    of the results, and its ε of q and k.
    """

    kind: ClassVar[str] = "gated_delta_net"
    takes_trees: ClassVar[bool] = True

    key_heads: int
    value_heads: int
    head_dim: int
    taps: int
    norm: NormSpec
    repeats_each: bool = False
    slots: int = 2

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.head_dim

    @property
    def result_width(self) -> int:
        return self.value_width

    @property
    def channels(self) -> int:
        """Elements of q, k and v together."""
        return 2 * self.key_width + self.value_width

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: q, k and v before the convolution, β, g. Matrix: (value_heads, head_dim / 16, head_dim, 16),
        sixteen columns of S after each other.
        """
        width, heads = padded(self.channels), padded(self.value_heads)
        matrix = self.value_heads * padded(self.head_dim) * self.head_dim
        return RecurrentShape(self.taps - 1, width, width + 2 * heads, matrix, self.slots, self.head_dim)

    @property
    def pairs_width(self) -> int:
        """As `DeltaRuleSizes` needs it: two matrices of positions, and two decays of each."""
        return DELTA_POSITIONS * (2 * DELTA_POSITIONS + 2)

    def read(self, tensors: TensorReader) -> "GatedDeltaNetWeights":
        width, heads = tensors.hidden_size, self.value_heads
        qkv, z = self._projections(tensors)
        beta, alpha = self._gates(tensors)
        taps = tensors.required("ssm_conv1d.weight", self.channels * self.taps)
        return GatedDeltaNetWeights(
            qkv=qkv,
            z=z,
            beta=beta,
            alpha=alpha,
            output=tensors.matrix("ssm_out", width, self.value_width),
            taps=taps.reshape(self.channels, self.taps).T,
            a=tensors.required("ssm_a", heads),
            dt=tensors.required("ssm_dt.bias", heads),
            norm=tensors.required("ssm_norm.weight", self.head_dim),
        )

    def _projections(self, tensors: TensorReader) -> tuple[Matrix, Matrix]:
        """W_qkv and W_z. Older files have one matrix with q, k, v and z of each key head together."""
        width = tensors.hidden_size
        rows = self.channels + self.value_width
        if not tensors.has_shape("ssm_in", rows, width):
            qkv = tensors.matrix("attn_qkv", self.channels, width)
            return qkv, tensors.matrix("attn_gate", self.value_width, width)
        share, dim = self.value_width // self.key_heads, self.head_dim
        index = np.arange(rows).reshape(self.key_heads, -1)
        q, k, v, z = np.split(index, [dim, 2 * dim, 2 * dim + share], axis=1)
        whole = tensors.matrix("ssm_in", rows, width)
        order = np.concatenate([q.reshape(-1), k.reshape(-1), v.reshape(-1)])
        return whole.reordered(order), whole.reordered(z.reshape(-1))

    def _gates(self, tensors: TensorReader) -> tuple[Matrix, Matrix]:
        """W_β and W_a; one matrix with both of each key head together, if the file has it."""
        width, heads = tensors.hidden_size, self.value_heads
        if not tensors.has_shape("ssm_ba", 2 * heads, width):
            return tensors.matrix("ssm_beta", heads, width), tensors.matrix("ssm_alpha", heads, width)
        whole = tensors.matrix("ssm_ba", 2 * heads, width)
        index = np.arange(2 * heads).reshape(self.key_heads, 2, -1)
        return whole.reordered(index[:, 0].reshape(-1)), whole.reordered(index[:, 1].reshape(-1))

    def key_head(self, value_head: int) -> int:
        """The key head of a value head."""
        if self.repeats_each:
            return value_head // (self.value_heads // self.key_heads)
        return value_head % self.key_heads

    def sizes(self, weights: "GatedDeltaNetWeights", norms: NormLengths) -> "GatedDeltaNetSizes":
        *projections, output = map(MatrixSize.of, weights.matrices())
        vectors = (self.channels * self.taps, self.value_heads, self.value_heads, self.head_dim)
        return GatedDeltaNetSizes(self, tuple(projections), output, (*vectors, *norms.vectors))


@dataclass(frozen=True)
class GatedDeltaNetWeights(BlockWeights):
    """The weights of a gated delta net. taps: (taps, channels), the last for the token itself."""

    kind: ClassVar[str] = "gated_delta_net"

    qkv: Matrix
    z: Matrix
    beta: Matrix
    alpha: Matrix
    output: Matrix
    taps: Vector
    a: Vector
    dt: Vector
    norm: Vector

    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.z, self.beta, self.alpha, self.output]


@dataclass(frozen=True)
class DeltaRuleSizes(MatrixStateSizes):
    """The sizes of a block with the delta rule. Its specification has `value_heads` and `pairs_width`, the
    elements that a GPU prepares for the recurrence of DELTA_POSITIONS positions and a head.
    """

    @classmethod
    def prompt_bytes(cls, blocks: Sequence[Self], chunk: int, hidden_size: int) -> int:
        """Also what is prepared for the recurrence."""
        pairs = max(pairs_size(block.spec, chunk) for block in blocks)
        return super().prompt_bytes(blocks, chunk, hidden_size) + taken(pairs, 4)


def pairs_size(spec: Any, tokens: int) -> int:
    """Elements that a GPU prepares for the recurrence of a chunk with pending positions before it."""
    width: int = spec.value_heads * spec.pairs_width
    return -(-(tokens + RING_ROWS) // DELTA_POSITIONS) * width


@dataclass(frozen=True)
class GatedDeltaNetSizes(DeltaRuleSizes):
    """The sizes of a gated delta net."""

    label: ClassVar[str] = "gated delta net"

    spec: GatedDeltaNetSpec

    def state_operations(self, tokens: int, start: int) -> float:
        """Three products of each value head's state with a vector, and the convolution."""
        spec = self.spec
        return 2 * tokens * (3 * spec.value_width * spec.head_dim + spec.channels * spec.taps)
