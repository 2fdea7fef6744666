"""Gated delta net: specification, weights and sizes of one block."""

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

MAX_TAPS = 32


@dataclass(frozen=True)
class GatedDeltaNetSpec(RecurrentSpec):
    """Linear attention whose state S (head_dim, head_dim) of each value head is updated by the delta rule.

    q, k, v = silu(conv(W_qkv h)), q and k with length 1; β = sigmoid(W_β h), g = a · softplus(W_a h + dt):
    S ← e^g S; S ← S + k (β (v - Sᵀ k))ᵀ; o = Sᵀ q / √head_dim. The result is W_out (norm(o) · silu(W_z h)).

    Value head i reads key head i mod key_heads, or if `repeats_each` i // (value_heads / key_heads). `norm`:
    of the results, and its ε of q and k.
    """

    kind: ClassVar[str] = "gated_delta_net"

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
        return RecurrentShape(self.taps - 1, width, width + 2 * heads, matrix, self.slots)

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
        qkv, z, beta, alpha, output = map(MatrixSize.of, weights.matrices())
        vectors = (self.channels * self.taps, self.value_heads, self.value_heads, self.head_dim)
        return GatedDeltaNetSizes(self, qkv, z, beta, alpha, output, (*vectors, *norms.vectors))


@dataclass(frozen=True)
class GatedDeltaNetWeights:
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

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class GatedDeltaNetSizes(RecurrentSizes):
    """The sizes of a gated delta net. `vectors`: lengths of its vectors and norms."""

    label: ClassVar[str] = "gated delta net"

    spec: GatedDeltaNetSpec
    qkv: MatrixSize
    z: MatrixSize
    beta: MatrixSize
    alpha: MatrixSize
    output: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [self.qkv, self.z, self.beta, self.alpha, self.output]

    def undivided_device_bytes(self) -> int:
        stack = sum(map(matrix_bytes, self.stacked_inputs()))
        return stack + matrix_bytes(self.output) + vector_bytes(self.vectors)

    def state_operations(self, tokens: int, start: int) -> float:
        """Three products of each value head's state with a vector, and the convolution."""
        spec = self.spec
        return 2 * tokens * (3 * spec.value_width * spec.head_dim + spec.channels * spec.taps)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        values = padded(self.spec.value_width)
        return {
            "state_rows": 4 * self.spec.recurrent.row_width,
            "conv_rows": 4 * padded(self.spec.channels),
            "projected_z": 4 * values,
            "attn_out": 4 * values,
            "attn_out.quantized": quantized_bytes(values),
        }

    def cpu_scratch(self) -> int:
        return ROWS_SCRATCH

    def inputs(self) -> list[MatrixSize]:
        return [self.qkv, self.z, self.beta, self.alpha]

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.inputs())

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    @classmethod
    def step_bytes(cls, blocks: Sequence["GatedDeltaNetSizes"], step: StepShape) -> int:
        """The projections, rows of the state, the convolution's results with those of pending positions, and
        the results of the heads, which the last projection reads.
        """
        rows = max(sum(padded_rows(run.rows) for run in block.stacked_inputs()) for block in blocks)
        values = max(block.spec.value_width for block in blocks)
        conv_out = activation_bytes(step.tokens, values, has_floats(block.output for block in blocks))
        floats = [
            step.tokens * rows,
            step.tokens * max(block.spec.recurrent.row_width for block in blocks),
            (step.tokens + RING_ROWS) * max(block.spec.channels for block in blocks),
            step.tokens * values,
        ]
        return conv_out + sum(taken(count, 4) for count in floats)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["GatedDeltaNetSizes"], chunk: int, hidden_size: int) -> int:
        """The rows of the state, the convolution's results with those of pending positions, and the results
        of the heads.
        """
        rows = chunk * max(block.spec.recurrent.row_width for block in blocks)
        conv = (chunk + RING_ROWS) * max(block.spec.channels for block in blocks)
        values = chunk * max(block.spec.value_width for block in blocks)
        return taken(rows, 4) + taken(conv, 4) + taken(values, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        rows = sum(padded_rows(run.rows) for run in self.stacked_inputs())
        return ChunkRows(chunk * self.spec.value_width, chunk, chunk * max(rows, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
