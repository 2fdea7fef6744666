"""Attention in numpy."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.alibi import alibi_slopes
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.common.temperature import Temperature
from edgeinfer_kernels.blocks.embedding.draft_input import PAIR
from edgeinfer_kernels.matrix import Vector
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, sigmoid, soft_cap, softplus


class ScoreSpec(Protocol):
    """What determines the scores of attention, of a specification."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def chunked(self) -> bool: ...
    @property
    def soft_cap(self) -> float: ...
    @property
    def alibi(self) -> float: ...


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): the output projection of softmax attention. The keys and values of h are written
    to the cache.
    """
    spec, w, cache = step.spec, step.weights, step.state.cache
    h = step.shared[PAIR] if spec.pair_input else h
    q, gate = _queries(_clamped(step.times(h, w.attn_q, w.attn_q_bias), spec), spec)
    q = _heads(q, spec, w.attn_q_norm)
    k, v = keys_and_values(step, spec, w, h)
    if step.batch is None:
        if spec.source_layer is None:
            cache.write(step.start, apply_rope(k, spec.rope, step.start), v)
        keys, values = (
            held.astype(step.dtype) for held in cache.read(step.start + len(h), spec.head_dim, spec.value_dim)
        )
        rows = _rope_queries(step, q, step.start)
        out = attend(rows, keys, values, step.start, spec, w.attn_sinks, whole_step=spec.whole_step)
    else:
        out = _attend_batch(step, step.batch, q, k, v)
    out = out.reshape(len(h), -1)
    if w.sub_norm is not None:
        out = normalize(out, w.sub_norm.spec(spec.norm), w.sub_norm.weight)
    if w.attn_gate is not None:
        gate = np.repeat(step.times(h, w.attn_gate), spec.head_dim, axis=1)
    if gate is not None:
        out = out * (softplus(gate) if spec.gate_function == "softplus" else sigmoid(gate))
    return step.times(out, w.attn_output, w.attn_output_bias)


def keys_and_values(
    step: BlockStep, spec: AttentionSpec, w: AttentionWeights, h: Array
) -> tuple[Array, Array]:
    """Keys (tokens, kv_heads, head_dim) without RoPE, and values (tokens, kv_heads, length of a value)."""
    k = _heads(_clamped(step.times(h, w.attn_k, w.attn_k_bias), spec), spec, w.attn_k_norm)
    return k, _values(_clamped(step.times(h, w.attn_v, w.attn_v_bias), spec), spec)


def _clamped(rows: Array, spec: AttentionSpec) -> Array:
    return np.clip(rows, -spec.clamp, spec.clamp) if spec.clamp else rows


def _queries(rows: Array, spec: AttentionSpec) -> tuple[Array, Array | None]:
    """Queries, and gates if there are any: (tokens, heads · head_dim) of each."""
    if not spec.gated:
        return rows, None
    both = rows.reshape(len(rows), spec.heads, 2, spec.head_dim)
    return both[:, :, 0].reshape(len(rows), -1), both[:, :, 1].reshape(len(rows), -1)


def _heads(rows: Array, spec: AttentionSpec, norm: Vector | None) -> Array:
    """Projected rows as (tokens, heads, head_dim), with q/k norm."""
    if spec.qk_norm == "row":
        rows = normalize(rows, spec.norm, norm)
    heads = rows.reshape(len(rows), -1, spec.head_dim)
    return normalize(heads, spec.norm, norm) if spec.qk_norm == "head" else heads


def _values(rows: Array, spec: AttentionSpec) -> Array:
    """Projected rows as (tokens, kv_heads, head_dim), normalized if the block does that."""
    heads = rows.reshape(len(rows), -1, spec.value_dim)
    return normalize(heads, spec.norm, np.ones(spec.head_dim, rows.dtype)) if spec.value_norm else heads


def _rope_queries(step: BlockStep, q: Array, start: int) -> Array:
    """`apply_rope` to queries, with the factors of their elements and of their positions."""
    spec, weights, rows = step.spec, step.weights.query_weights, apply_rope(q, step.spec.rope, start)
    rows = rows if weights is None else np.asarray(rows * weights)
    return with_temperature(rows, spec.temperature, np.arange(start, start + len(q)))


def with_temperature(queries: Array, temperature: Temperature, positions: npt.NDArray[np.int64]) -> Array:
    """Queries (tokens, heads, head_dim) times the factors of their positions."""
    factors = temperature.factors(positions).astype(queries.dtype)
    return np.asarray(queries * factors[:, None, None]) if temperature else queries


def apply_rope(x: Array, rope: RopeSpec | None, start: int) -> Array:
    """Apply RoPE to x (tokens, heads, head_dim) of tokens at positions start…"""
    if rope is None:
        return x
    return rope.apply(x, rope.table(start, len(x), x.dtype)[:, None, :])


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    start: int,
    spec: ScoreSpec,
    sinks: Vector | None = None,
    *,
    whole_step: bool = False,
) -> Array:
    """Softmax attention of queries (tokens, heads, head_dim) over keys (kv_heads, positions, head_dim) and
    values (kv_heads, positions, length of a value); sinks (heads,) add one more score per head, without a
    value. `whole_step`: as in `AttentionSpec`.
    """
    group = spec.heads // spec.kv_heads
    out = np.empty((*queries.shape[:2], values.shape[-1]), queries.dtype)
    weights_of = attention_weights(queries, keys, start, spec, sinks, whole_step=whole_step)
    for head, weights in enumerate(weights_of):
        out[:, head] = weights @ values[head // group]
    return out


def attention_weights(
    queries: Array,
    keys: Array,
    start: int,
    spec: ScoreSpec,
    sinks: Vector | None = None,
    *,
    whole_step: bool = False,
) -> Iterator[Array]:
    """The softmax weights of `attend`: (tokens, positions) for each head in order."""
    tokens, heads, _ = queries.shape
    group = heads // spec.kv_heads
    position = np.arange(keys.shape[1])
    own = start + np.arange(tokens)[:, None]
    visible = (position <= own) | whole_step
    if spec.window:
        visible &= position >= (own // spec.window * spec.window if spec.chunked else own - spec.window + 1)
    slopes = alibi_slopes(heads, spec.alibi).astype(queries.dtype)
    for head in range(heads):
        scores = soft_cap(queries[:, head] @ keys[head // group].T * spec.scale, spec.soft_cap)
        scores = scores - slopes[head] * (own - position) if spec.alibi else scores
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        sink = np.full_like(top, -np.inf) if sinks is None else np.full_like(top, sinks[head])
        top = np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        yield weights / total


def _attend_batch(step: BlockStep, batch: BatchPositions, q: Array, k: Array, v: Array) -> Array:
    """Attention token by token, each over its sequence; all keys and values are written first."""
    spec, cache, sinks = step.spec, step.state.cache, step.weights.attn_sinks
    positions = [int(position) for position in batch.positions]
    for token, position in enumerate(positions if spec.source_layer is None else ()):
        key = apply_rope(k[token : token + 1], spec.rope, position)
        copies = (batch.copies or [()] * len(k))[token]
        for slot in (int(batch.slots(token, position + 1)[-1]), *copies):
            cache.write(slot, key, v[token : token + 1])
    out = np.empty((*q.shape[:2], spec.value_dim), q.dtype)
    for token, position in enumerate(positions):
        query = _rope_queries(step, q[token : token + 1], position)
        slots = batch.slots(token, position + 1)
        held = cache.read(cache.positions, spec.head_dim, spec.value_dim)
        keys, values = (part[:, slots].astype(step.dtype) for part in held)
        out[token] = attend(query, keys, values, position, spec, sinks)[0]
    return out
