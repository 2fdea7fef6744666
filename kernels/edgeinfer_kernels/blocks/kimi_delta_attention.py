"""Kimi Delta Attention: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeinfer_kernels.blocks.block import (
    ChunkRows,
    NormLengths,
    NormSpec,
    RecurrentSizes,
    RecurrentSpec,
    StepShape,
    TensorReader,
)
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS, ROWS_SCRATCH, quantized_bytes
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    row_runs,
    taken,
    vector_bytes,
)

KEY_POSITIONS = 16
"""Positions of a prompt whose keys a GPU multiplies with each other."""


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
    def width(self) -> int:
        """Elements of q, of k, of v, and of g."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.width

    @property
    def value_width(self) -> int:
        return self.width

    @property
    def channels(self) -> int:
        """Elements of q, k and v together."""
        return 3 * self.width

    def key_head(self, value_head: int) -> int:
        """The key head of a value head."""
        return value_head

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: q, k and v before the convolution, β, g. Matrix: (heads, head_dim / 16, head_dim, 16),
        sixteen columns of S after each other.
        """
        tail, row = self.channels, self.channels + padded(self.heads) + self.width
        return RecurrentShape(self.taps - 1, tail, row, self.width * self.head_dim, self.slots)

    def pairs_of(self, positions: int) -> int:
        """Elements of what a GPU prepares for the recurrence of a chunk of a prompt, from keys and decays."""
        count = KEY_POSITIONS * (2 * KEY_POSITIONS + self.head_dim) + self.head_dim
        return -(-positions // KEY_POSITIONS) * self.heads * count

    def read(self, tensors: TensorReader) -> "KimiDeltaAttentionWeights":
        width, rank, own = tensors.hidden_size, self.head_dim, self.width
        count = own * self.taps
        taps = [tensors.required(f"ssm_conv1d_{part}.weight", count).reshape(own, -1) for part in "qkv"]
        return KimiDeltaAttentionWeights(
            q=tensors.matrix("attn_q", own, width),
            k=tensors.matrix("attn_k", own, width),
            v=tensors.matrix("attn_v", own, width),
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

    def sizes(self, weights: "KimiDeltaAttentionWeights", norms: NormLengths) -> "KimiDeltaAttentionSizes":
        vectors = (self.channels * self.taps, self.width, self.width, self.head_dim, *norms.vectors)
        return KimiDeltaAttentionSizes(self, *map(MatrixSize.of, weights.matrices()), vectors=vectors)


@dataclass(frozen=True)
class KimiDeltaAttentionWeights:
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
        return [self.q, self.k, self.v, self.beta, self.f1, self.g1, self.f2, self.g2, self.output]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class KimiDeltaAttentionSizes(RecurrentSizes):
    """The sizes of a Kimi Delta Attention. `vectors`: lengths of its vectors and norms."""

    label: ClassVar[str] = "kimi delta attention"

    spec: KimiDeltaAttentionSpec
    q: MatrixSize
    k: MatrixSize
    v: MatrixSize
    beta: MatrixSize
    f1: MatrixSize
    g1: MatrixSize
    f2: MatrixSize
    g2: MatrixSize
    output: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [*self.inputs(), self.f2, self.g2, self.output]

    def undivided_device_bytes(self) -> int:
        stacks = [*self.stacked_inputs(), self.f2, self.g2, self.output]
        return sum(map(matrix_bytes, stacks)) + vector_bytes(self.vectors)

    def state_operations(self, tokens: int, start: int) -> float:
        """Three products of each head's state with a vector, its decay, and the convolution."""
        spec = self.spec
        return 2 * tokens * (4 * spec.width * spec.head_dim + spec.channels * spec.taps)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        values, rank = self.spec.width, self.spec.head_dim
        low = {f"low_rank_{name}": 4 * rank for name in "fg"}
        low |= {f"low_rank_{name}.quantized": quantized_bytes(rank) for name in "fg"}
        return {
            "state_rows": 4 * self.spec.recurrent.row_width,
            "conv_rows": 4 * (self.spec.channels + values),
            **low,
            "projected_z": 4 * values,
            "attn_out": 4 * values,
            "attn_out.quantized": quantized_bytes(values),
        }

    def cpu_scratch(self) -> int:
        return ROWS_SCRATCH

    def inputs(self) -> list[MatrixSize]:
        return [self.q, self.k, self.v, self.f1, self.g1, self.beta]

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.inputs())

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    @classmethod
    def step_bytes(cls, blocks: Sequence["KimiDeltaAttentionSizes"], step: StepShape) -> int:
        """The projections, F₂ F₁ h, z, rows of the state, the convolution's results with those of pending
        positions, the results of the heads, and the inputs of F₂, G₂ and the last projection.
        """
        specs = [block.spec for block in blocks]
        width, rank = max(spec.width for spec in specs), max(spec.head_dim for spec in specs)
        rows = max(sum(padded_rows(run.rows) for run in block.stacked_inputs()) for block in blocks)
        activations = [
            (width, [block.output for block in blocks]),
            (rank, [block.f2 for block in blocks]),
            (rank, [block.g2 for block in blocks]),
        ]
        floats = [
            step.tokens * rows,
            *3 * [step.tokens * width],
            step.tokens * max(spec.recurrent.row_width for spec in specs),
            (step.tokens + RING_ROWS) * 3 * width,
        ]
        words = (activation_bytes(step.tokens, columns, has_floats(read)) for columns, read in activations)
        return sum(words) + sum(taken(count, 4) for count in floats)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["KimiDeltaAttentionSizes"], chunk: int, hidden_size: int) -> int:
        """The rows of the state, the convolution's results with those of pending positions, the results of
        the heads, F₁ h and G₁ h with their scales, and products of keys.
        """
        specs = [block.spec for block in blocks]
        width = max(spec.width for spec in specs)
        floats = [
            chunk * max(spec.recurrent.row_width for spec in specs),
            (chunk + RING_ROWS) * 3 * width,
            chunk * width,
            chunk,
            max(spec.pairs_of(chunk + RING_ROWS) for spec in specs),
        ]
        low = taken(chunk * 2 * max(spec.head_dim for spec in specs), 2)
        return low + sum(taken(count, 4) for count in floats)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        rows = sum(padded_rows(run.rows) for run in self.stacked_inputs())
        return ChunkRows(chunk * self.spec.width, chunk, chunk * max(rows, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
