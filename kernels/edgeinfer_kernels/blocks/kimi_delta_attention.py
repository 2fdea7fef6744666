"""Kimi Delta Attention: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import NormLengths, StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.blocks.gated_delta_net import DELTA_POSITIONS, DeltaRuleSizes
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.cuda_matrices import activation_bytes, has_floats, matrix_bytes, taken


@dataclass(frozen=True)
class KimiDeltaAttentionSpec(RecurrentSpec):
    """A gated delta net whose state S (head_dim, head_dim) of each head has a decay for each key element.

    q, k, v = silu(conv(W_q h)), silu(conv(W_k h)), silu(conv(W_v h)), q and k with length 1;
    β = sigmoid(W_β h), g = a · softplus(F₂ F₁ h + dt), where a is one number of each head:
    S ← diag(e^g) S; S ← S + k (β (v - Sᵀ k))ᵀ; o = Sᵀ q / √head_dim.
    The result is W_out (norm(o) · sigmoid(G₂ G₁ h)). F₁ and G₁ have head_dim rows.

    `norm`: of the results, and its ε of q and k.
    """

    kind: ClassVar[str] = "kimi_delta_attention"
    takes_trees: ClassVar[bool] = True
    repeats_each: ClassVar[bool] = False

    heads: int
    head_dim: int
    taps: int
    norm: NormSpec
    slots: int = 2

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def value_heads(self) -> int:
        return self.heads

    @property
    def result_width(self) -> int:
        """Elements of q, of k, of v, and of g."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of q, k and v together."""
        return 3 * self.result_width

    def key_head(self, value_head: int) -> int:
        """The key head of a value head."""
        return value_head

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: q, k and v before the convolution, β, g. Matrix: (heads, head_dim / 16, head_dim, 16),
        sixteen columns of S after each other.
        """
        tail, row = self.channels, self.channels + padded(self.heads) + self.result_width
        return RecurrentShape(
            self.taps - 1, tail, row, self.result_width * self.head_dim, self.slots, self.head_dim
        )

    @property
    def pairs_width(self) -> int:
        """As `DeltaRuleSizes` needs it: two matrices of positions, their decayed keys, and a decay."""
        return DELTA_POSITIONS * (2 * DELTA_POSITIONS + self.head_dim) + self.head_dim

    def read(self, tensors: TensorReader) -> "KimiDeltaAttentionWeights":
        width, rank, own = tensors.hidden_size, self.head_dim, self.result_width
        count = own * self.taps
        taps = [tensors.required(f"ssm_conv1d_{part}.weight", count).reshape(own, -1) for part in "qkv"]
        q, k, v = self._projections(tensors)
        return KimiDeltaAttentionWeights(
            q=q,
            k=k,
            v=v,
            beta=tensors.matrix("ssm_beta", self.heads, width),
            f1=tensors.matrix("ssm_f_a", rank, width),
            g1=tensors.matrix("ssm_g_a", rank, width),
            f2=tensors.matrix("ssm_f_b", own, rank),
            g2=tensors.matrix("ssm_g_b", own, rank),
            output=tensors.matrix("attn_output", width, own),
            taps=np.concatenate(taps).T,
            a=np.repeat(tensors.required("ssm_a", self.heads), self.head_dim),
            dt=tensors.required("ssm_dt.bias", own),
            norm=tensors.required("ssm_norm.weight", self.head_dim),
        )

    def _projections(self, tensors: TensorReader) -> list[Matrix]:
        """W_q, W_k and W_v, which may be one matrix in the file."""
        own, width = self.result_width, tensors.hidden_size
        whole = tensors.matrix_or_none("attn_qkv", self.channels, width)
        if whole is None:
            return [tensors.matrix(f"attn_{part}", own, width) for part in "qkv"]
        return [whole.take_rows(first, first + own) for first in range(0, self.channels, own)]

    def sizes(self, weights: "KimiDeltaAttentionWeights", norms: NormLengths) -> "KimiDeltaAttentionSizes":
        vectors = (
            self.channels * self.taps,
            self.result_width,
            self.result_width,
            self.head_dim,
            *norms.vectors,
        )
        *projections, f2, g2, output = map(MatrixSize.of, weights.matrices())
        return KimiDeltaAttentionSizes(self, tuple(projections), output, vectors, f2, g2)


@dataclass(frozen=True)
class KimiDeltaAttentionWeights(BlockWeights):
    """The weights of a Kimi Delta Attention. taps: (taps, channels), the last for the token itself. a: the
    number of each head, for each element of g.
    """

    kind: ClassVar[str] = "kimi_delta_attention"

    q: Matrix
    k: Matrix
    v: Matrix
    beta: Matrix
    f1: Matrix
    g1: Matrix
    f2: Matrix
    g2: Matrix
    output: Matrix
    taps: Vector
    a: Vector
    dt: Vector
    norm: Vector

    def matrices(self) -> list[Matrix]:
        return [self.q, self.k, self.v, self.f1, self.g1, self.beta, self.f2, self.g2, self.output]


@dataclass(frozen=True)
class KimiDeltaAttentionSizes(DeltaRuleSizes):
    """The sizes of a Kimi Delta Attention."""

    label: ClassVar[str] = "kimi delta attention"

    spec: KimiDeltaAttentionSpec
    f2: MatrixSize
    g2: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [*self.projections, self.f2, self.g2, self.output]

    def undivided_device_bytes(self) -> int:
        return super().undivided_device_bytes() + matrix_bytes(self.f2) + matrix_bytes(self.g2)

    def state_operations(self, tokens: int, start: int) -> float:
        """Three products of each head's state with a vector, its decay, and the convolution."""
        spec = self.spec
        return 2 * tokens * (4 * spec.result_width * spec.head_dim + spec.channels * spec.taps)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        rank = self.spec.head_dim
        low = {f"low_rank_{name}": 4 * rank for name in "fg"}
        low |= {f"low_rank_{name}.quantized": quantized_bytes(rank) for name in "fg"}
        conv_rows = 4 * (self.spec.channels + self.spec.result_width)
        return {**super().cpu_buffers(hidden_size), **low, "conv_rows": conv_rows}

    @classmethod
    def step_bytes(cls, blocks: Sequence[Self], step: StepShape) -> int:
        """Also F₂ F₁ h and z, and the inputs of F₂ and G₂."""
        width, rank = (
            max(getattr(block.spec, name) for block in blocks) for name in ("result_width", "head_dim")
        )
        inputs = [[block.f2 for block in blocks], [block.g2 for block in blocks]]
        words = sum(activation_bytes(step.tokens, rank, has_floats(read)) for read in inputs)
        return super().step_bytes(blocks, step) + words + 2 * taken(step.tokens * width, 4)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence[Self], chunk: int, hidden_size: int) -> int:
        """Also F₁ h and G₁ h with their scales."""
        low = 2 * chunk * max(block.spec.head_dim for block in blocks)
        return super().prompt_bytes(blocks, chunk, hidden_size) + taken(low, 2) + taken(chunk, 4)
