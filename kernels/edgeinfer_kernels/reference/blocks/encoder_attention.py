"""Attention of an encoder in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.encoder_attention import (
    TEXT_BOUNDS,
    EncoderAttentionSpec,
    EncoderAttentionWeights,
)
from edgeinfer_kernels.matrix import Vector
from edgeinfer_kernels.reference.blocks.attention import apply_rope
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): the output projection of softmax attention within each text."""
    weights: EncoderAttentionWeights = step.weights
    spec, w = step.spec, weights.attention
    q = _heads(step.times(h, w.attn_q, w.attn_q_bias), spec, w.attn_q_norm, weights.q_norm_bias)
    k = _heads(step.times(h, w.attn_k, w.attn_k_bias), spec, w.attn_k_norm, weights.k_norm_bias)
    v = step.times(h, w.attn_v, w.attn_v_bias).reshape(k.shape)
    out = np.empty_like(q)
    for first, end in np.unique(step.shared[TEXT_BOUNDS].astype(np.int64), axis=0):
        queries, keys = (apply_rope(rows[first:end], spec.rope, 0) for rows in (q, k))
        out[first:end] = _attend(queries, keys, v[first:end], spec)
    return step.times(out.reshape(len(h), -1), w.attn_output, w.attn_output_bias)


def _heads(rows: Array, spec: EncoderAttentionSpec, norm: Vector | None, bias: Vector | None) -> Array:
    """Projected rows as (tokens, heads, head_dim), with q/k norm."""
    if spec.qk_norm == "row":
        rows = normalize(rows, spec.norm, norm, bias)
    heads = rows.reshape(len(rows), -1, spec.head_dim)
    return normalize(heads, spec.norm, norm) if spec.qk_norm == "head" else heads


def _attend(queries: Array, keys: Array, values: Array, spec: EncoderAttentionSpec) -> Array:
    """(tokens, heads, head_dim): softmax attention of the tokens of one text."""
    position = np.arange(len(queries))
    distance = np.abs(position[:, None] - position)
    hidden = distance > spec.window // 2 if spec.window else np.zeros(distance.shape, bool)
    group, slopes, out = spec.heads // spec.kv_heads, spec.slopes(), np.empty_like(queries)
    for head in range(spec.heads):
        scores = queries[:, head] @ keys[:, head // group].T * spec.scale - slopes[head] * distance
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, head // group]
    return out
