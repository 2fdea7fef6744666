"""The weights of an attention block, how they are read, and the check whether a GPU supports them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgeinfer_kernels.blocks.common.block import BlockWeights, TensorReader
from edgeinfer_kernels.blocks.common.projections import read_biases, read_projections
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm, read_attention_sub_norm
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector

if TYPE_CHECKING:
    from edgeinfer_kernels.blocks.attention import AttentionSpec


@dataclass(frozen=True)
class AttentionWeights(BlockWeights):
    """The weights of an attention block, by GGUF name; None where the architecture has no such weight."""

    kind: ClassVar[str] = "attention"

    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_output: Matrix
    attn_q_bias: Vector | None = None
    attn_k_bias: Vector | None = None
    attn_v_bias: Vector | None = None
    attn_output_bias: Vector | None = None
    attn_q_norm: Vector | None = None
    attn_k_norm: Vector | None = None
    query_weights: Vector | None = None
    """Factors of a head's query after RoPE."""
    attn_sinks: Vector | None = None
    attn_gate: Matrix | None = None
    """A row for each head."""
    sub_norm: SubNorm | None = None

    def inputs(self) -> list[Matrix]:
        """The matrices of queries, keys, values and gates, if there are any."""
        found = [matrix for matrix in (self.attn_q, self.attn_k, self.attn_v) if matrix.rows]
        return found if self.attn_gate is None else [*found, self.attn_gate]

    def matrices(self) -> list[Matrix]:
        return [*self.inputs(), self.attn_output]


def read_attention(spec: "AttentionSpec", tensors: TensorReader) -> AttentionWeights:
    """The weights of a block that a file has."""
    if spec.source_layer is not None:
        return _read_queries(spec, tensors)
    width = tensors.hidden_size
    q, k, v = _read_projections(spec, tensors)
    q_bias, k_bias, v_bias = read_biases(tensors, spec.projected_rows)
    q_norm, k_norm, query_weights = _read_norms(spec, tensors)
    sub_norm = None
    if spec.sub_norm:
        sub_norm, query_weights = read_attention_sub_norm(tensors, spec.q_rows, spec.head_dim)
    return AttentionWeights(
        attn_q=q,
        attn_k=k,
        attn_v=v,
        attn_output=tensors.matrix("attn_output", width, spec.result_columns),
        attn_q_bias=q_bias,
        attn_k_bias=k_bias,
        attn_v_bias=v_bias,
        attn_output_bias=tensors.vector("attn_output.bias", width),
        attn_q_norm=q_norm,
        attn_k_norm=k_norm,
        query_weights=query_weights,
        attn_sinks=_read_sinks(spec, tensors),
        attn_gate=tensors.matrix("attn_gate", spec.heads, width) if spec.head_gated else None,
        sub_norm=sub_norm,
    )


def _read_queries(spec: "AttentionSpec", tensors: TensorReader) -> AttentionWeights:
    """The weights of a block without keys and values, whose matrices have no rows. A file may have unused
    ones.
    """
    width = tensors.hidden_size
    for name in ("attn_k", "attn_v"):
        tensors.matrix_or_none(name, spec.kv_rows, width)
    tensors.vector("attn_k_norm.weight", spec.head_dim)
    q = tensors.matrix("attn_q", spec.q_rows, width)
    return AttentionWeights(
        attn_q=q,
        attn_k=q.take_rows(0, 0),
        attn_v=q.take_rows(0, 0),
        attn_output=tensors.matrix("attn_output", width, spec.q_rows),
        attn_q_norm=tensors.required("attn_q_norm.weight", spec.head_dim),
    )


def _read_projections(spec: "AttentionSpec", tensors: TensorReader) -> tuple[Matrix, Matrix, Matrix]:
    """The matrices of queries, with their gates, of keys and of values."""
    width = tensors.hidden_size
    if spec.gated and tensors.has_shape("attn_gate", spec.q_rows, width):
        q = tensors.alternating(("attn_q", "attn_gate"), spec.q_rows, width, spec.head_dim)
        return q, tensors.matrix("attn_k", spec.kv_rows, width), tensors.matrix("attn_v", spec.kv_rows, width)
    columns = 2 * width if spec.pair_input else width
    q, k, v = read_projections(tensors, spec.projected_rows, columns, spec.values_from_keys)
    return q, k, v


def _read_norms(
    spec: "AttentionSpec", tensors: TensorReader
) -> tuple[Vector | None, Vector | None, Vector | None]:
    """The weights of the norms of queries and keys, and factors of queries after RoPE."""
    if spec.qk_norm == "none":
        return None, None, None
    lengths = (spec.q_rows, spec.kv_rows) if spec.qk_norm == "row" else (spec.head_dim, spec.head_dim)
    q_norm, k_norm = (
        tensors.required(f"attn_{part}_norm.weight", length)
        if spec.qk_norm_weights
        else np.ones(length, np.float32)
        for part, length in zip("qk", lengths, strict=True)
    )
    if spec.norm_after_rope:
        return np.ones_like(q_norm), np.ones_like(k_norm), q_norm * k_norm
    return q_norm, k_norm, None


def _read_sinks(spec: "AttentionSpec", tensors: TensorReader) -> Vector | None:
    if not spec.sinks:
        return None
    name = "attn_sinks.weight"
    return tensors.vector(name, spec.heads) if spec.optional_sinks else tensors.required(name, spec.heads)


def check_device_rows(
    spec: "AttentionSpec", q: MatrixSize | Matrix, k: MatrixSize | Matrix, v: MatrixSize | Matrix
) -> None:
    """Raise `UnsupportedOnDeviceError` if the GPU kernels don't support the projections."""
    if q.rows % ROW_MULTIPLE or k.rows % ROW_MULTIPLE:
        raise UnsupportedOnDeviceError(
            f"{k.name}: {k.rows} rows (q: {q.rows}), the GPU kernels need a multiple of {ROW_MULTIPLE}"
        )
    if spec.head_gated and v.rows % ROW_MULTIPLE:
        raise UnsupportedOnDeviceError(
            f"{v.name}: {v.rows} rows before gates, the GPU kernels need a multiple of {ROW_MULTIPLE}"
        )
