"""Latent attention in numpy."""

import numpy as np

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from edgeinfer_kernels.reference.blocks.attention import apply_rope, attend, with_temperature
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): the output projection of softmax attention with the cached latent vectors as
    keys and values. Those of h are written to the cache.
    """
    spec, w, cache = step.spec, step.weights, step.state.cache
    queries, rows = _queries(step, h), step.times(h, w.attn_kv_a)
    rows[:, : spec.latent_dim] = normalize(rows[:, : spec.latent_dim], spec.norm, w.attn_kv_a_norm)
    own = np.arange(step.start, step.start + len(h)) if step.batch is None else step.batch.positions
    queries = with_temperature(queries, spec.temperature, own)
    if step.batch is None:
        cache.write(step.start, _with_rope(rows[:, None], spec, step.start)[:, 0])
        cached = cache.read(0, step.start + len(h)).astype(step.dtype)
        out = _attend(_with_rope(queries, spec, step.start), cached, step.start, spec)
    else:
        out = _attend_batch(step, step.batch, queries, rows)
    values = w.attn_v_b.decoded().astype(step.dtype).reshape(spec.heads, spec.value_dim, -1)
    return step.times(np.einsum("thl,hvl->thv", out, values).reshape(len(h), -1), w.attn_output)


def _queries(step: BlockStep, h: Array) -> Array:
    """(tokens, heads, cached_dim): W_kᵀ times the part without RoPE, then the part with it, before RoPE."""
    spec, w = step.spec, step.weights
    if w.attn_q_a is not None:
        h = normalize(step.times(h, w.attn_q_a), spec.norm, w.attn_q_a_norm)
    q = step.times(h, w.attn_q).reshape(len(h), spec.heads, spec.query_dim)
    keys = w.attn_k_b.decoded().astype(step.dtype).reshape(spec.heads, spec.latent_dim, -1)
    latent = np.einsum("thn,hln->thl", q[..., : spec.nope_dim], keys)
    return np.concatenate([latent, q[..., spec.nope_dim :]], axis=-1)


def _with_rope(rows: Array, spec: LatentAttentionSpec, start: int) -> Array:
    """Rows (tokens, heads, cached_dim) of tokens at positions start… with RoPE in their last elements."""
    tail = apply_rope(rows[..., spec.latent_dim :], spec.rope, start)
    return np.concatenate([rows[..., : spec.latent_dim], tail], axis=-1)


def _attend(queries: Array, cached: Array, start: int, spec: LatentAttentionSpec) -> Array:
    """(tokens, heads, latent_dim)"""
    return attend(queries, cached[None], cached[None, :, : spec.latent_dim], start, spec)


def _attend_batch(step: BlockStep, batch: BatchPositions, queries: Array, rows: Array) -> Array:
    """Attention token by token, each over its sequence; all rows are written first."""
    spec, cache = step.spec, step.state.cache
    positions = [int(position) for position in batch.positions]
    for token, position in enumerate(positions):
        row = _with_rope(rows[token : token + 1, None], spec, position)[:, 0]
        copies = (batch.copies or [()] * len(rows))[token]
        for slot in (int(batch.slots(token, position + 1)[-1]), *copies):
            cache.write(slot, row)
    out = np.empty((*queries.shape[:2], spec.latent_dim), queries.dtype)
    for token, position in enumerate(positions):
        query = _with_rope(queries[token : token + 1], spec, position)
        cached = cache.read(0, cache.positions)[batch.slots(token, position + 1)].astype(step.dtype)
        out[token] = _attend(query, cached, position, spec)[0]
    return out
