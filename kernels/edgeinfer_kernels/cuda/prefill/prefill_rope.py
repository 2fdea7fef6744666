"""From projected rows to the queries, keys and values of a prompt: biases, q/k norm, RoPE, write to the
cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    CACHES,
    Q4_0,
    hadamard_f16,
    recent_rows,
    store_cache_rows,
    store_recent_rows,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import LAYER, NO_NORM, NORMS
from edgeinfer_kernels.cuda.triton_ops.step_words import PAGE, clamped, scaled_queries, step_start
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two


class RopeConfig(NamedTuple):
    """The heads of a prompt's projection; padded_…, …dimensions: powers of two; norm: that of q and k, of
    whole rows if is_row_norm; value_dim, temperature, has_value_norm, clamp: as in `AttentionSpec`; is_ring:
    the cache is a ring; queries_only: there are no keys and values; has_positions: RoPE has other positions
    than the cache; gate_rows: elements of a row after the values; is_paged: the cache has pages; has_recent:
    and recent positions.
    """

    heads: int
    kv_heads: int
    padded_heads: int
    padded_kv_heads: int
    head_dim: int
    q_head: int
    dimensions: int
    value_dim: int
    value_dimensions: int
    norm: int
    is_row_norm: bool
    has_bias: bool
    key_type: int
    value_type: int
    temperature: float
    temperature_length: int
    has_query_weights: bool
    is_ring: bool
    has_value_norm: bool = False
    queries_only: bool = False
    clamp: float = 0.0
    has_positions: bool = False
    temperature_offset: int = 0
    gate_rows: int = 0
    is_paged: bool = False
    has_recent: bool = False


@triton.jit
def _rope_heads(
    projected, row_scale, bias, weight, epsilon, cosine, sine,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, STRIDE: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Heads (HEADS_2, DIMENSIONS) of one token, STRIDE apart, after norm and RoPE; 0 outside of them.

    Each element is loaded together with its RoPE partner, half a head away, so heads are not split.
    """
    HEAD_DIM: tl.constexpr = ROPE.head_dim
    NORM: tl.constexpr = ROPE.norm
    ROW: tl.constexpr = ROPE.is_row_norm
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, HEADS_2)[:, None]
    dimension = tl.arange(0, ROPE.dimensions)[None, :]
    mask = (head < HEADS) & (dimension < HEAD_DIM)
    partner = tl.where(dimension < HALF_DIM, dimension + HALF_DIM, dimension - HALF_DIM)
    own_at, partner_at = head * STRIDE + dimension, head * STRIDE + partner
    own = tl.load(projected + own_at, mask=mask, other=0.0).to(tl.float32) * row_scale
    other = tl.load(projected + partner_at, mask=mask, other=0.0).to(tl.float32) * row_scale
    if ROPE.has_bias:
        own += tl.load(bias + own_at, mask=mask, other=0.0)
        other += tl.load(bias + partner_at, mask=mask, other=0.0)
    own, other = clamped(own, ROPE.clamp), clamped(other, ROPE.clamp)
    if NORM != NO_NORM:
        COUNT: tl.constexpr = HEADS * HEAD_DIM if ROW else HEAD_DIM
        if NORM == LAYER:
            mean = tl.sum(own, axis=1)[:, None] / COUNT
            if ROW:
                mean = tl.sum(mean, axis=0)[None, :]
            own = tl.where(mask, own - mean, 0.0)
            other = tl.where(mask, other - mean, 0.0)
        square = tl.sum(own * own, axis=1)[:, None] / COUNT
        if ROW:
            square = tl.sum(square, axis=0)[None, :]
        root = tl.sqrt(square + epsilon)
        if ROW:
            own = own / root * tl.load(weight + own_at, mask=mask, other=0.0)
            other = other / root * tl.load(weight + partner_at, mask=mask, other=0.0)
        else:
            own = own / root * tl.load(weight + dimension, mask=dimension < HEAD_DIM, other=0.0)
            other = other / root * tl.load(weight + partner, mask=dimension < HEAD_DIM, other=0.0)
    return own * cosine[None, :] + other * sine[None, :]


@triton.jit
def _value_heads(
    projected, row_scale, bias, epsilon, HEADS: tl.constexpr, HEADS_2: tl.constexpr, ROPE: tl.constexpr
):
    """Heads of values, as `_rope_heads` without RoPE, and without weights of a norm."""
    VALUE_DIM: tl.constexpr = ROPE.value_dim
    head, dimension = tl.arange(0, HEADS_2)[:, None], tl.arange(0, ROPE.value_dimensions)[None, :]
    mask = (head < HEADS) & (dimension < VALUE_DIM)
    own = projected + head * VALUE_DIM + dimension
    values = tl.load(own, mask=mask, other=0.0).to(tl.float32) * row_scale
    if ROPE.has_bias:
        values += tl.load(bias + head * VALUE_DIM + dimension, mask=mask, other=0.0)
    values = clamped(values, ROPE.clamp)
    if ROPE.has_value_norm:
        values = values / tl.sqrt(tl.sum(values * values, axis=1)[:, None] / VALUE_DIM + epsilon)
    return values


@triton.jit
def _append(row, scale, bias, k_norm, epsilon, cosine, sine, cache, position, ROPE: tl.constexpr):
    """Append the keys and values of one token, in its projected row, to the cache."""
    KV_HEADS: tl.constexpr = ROPE.kv_heads
    KV_HEADS_2: tl.constexpr = ROPE.padded_kv_heads
    HEAD_DIM: tl.constexpr = ROPE.head_dim
    DIMENSIONS: tl.constexpr = ROPE.dimensions
    k_at = ROPE.heads * ROPE.q_head
    v_at = k_at + KV_HEADS * HEAD_DIM
    k_bias = bias + k_at if ROPE.has_bias else bias
    k = _rope_heads(
        row + k_at, scale, k_bias, k_norm, epsilon, cosine, sine, KV_HEADS, KV_HEADS_2, HEAD_DIM, ROPE
    )
    v_bias = bias + v_at if ROPE.has_bias else bias
    v = _value_heads(row + v_at, scale, v_bias, epsilon, KV_HEADS, KV_HEADS_2, ROPE)
    kv_head = tl.arange(0, KV_HEADS_2)
    row_at = position
    if ROPE.is_ring:
        row_at = position % cache.capacity
    if ROPE.is_paged:
        row_at = tl.load(cache.pages + position // PAGE) * PAGE + position % PAGE
    rows = kv_head.to(tl.int64) * cache.capacity + row_at
    rows_mask = kv_head < KV_HEADS
    store_cache_rows(cache.k, cache.k_scales, rows, rows_mask, k, HEAD_DIM, DIMENSIONS, ROPE.key_type)
    store_cache_rows(
        cache.v, cache.v_scales, rows, rows_mask, v, ROPE.value_dim, ROPE.value_dimensions, ROPE.value_type
    )
    if ROPE.has_recent:
        near = recent_rows(position + kv_head * 0, rows_mask, cache, cache.pages, ROPE.is_paged)
        near = kv_head.to(tl.int64) * cache.recent.capacity + near
        store_recent_rows(cache.recent.k, near, rows_mask, k, HEAD_DIM, ROPE.key_type)
        store_recent_rows(cache.recent.v, near, rows_mask, v, ROPE.value_dim, ROPE.value_type)


@triton.jit
def rope_append_kernel(
    qkv, row_scales, bias, q_norm, k_norm, query_weights, table, queries, cache, words, positions, epsilon,
    ROPE: tl.constexpr,
):  # fmt: skip
    """One token: q, k normed, (a, b) -> (a cos - b sin, a sin + b cos), b half a head after a; k, v appended.

    Without keys and values only q. Reads (heads + 2 kv_heads) · head_dim · 4 bytes (q and k twice, the second
    time from cache), writes half.
    """
    HEADS: tl.constexpr = ROPE.heads
    KV_HEADS: tl.constexpr = ROPE.kv_heads
    HEADS_2: tl.constexpr = ROPE.padded_heads
    HEAD_DIM: tl.constexpr = ROPE.head_dim
    DIMENSIONS: tl.constexpr = ROPE.dimensions
    token = tl.program_id(0)
    position = step_start(words) + token
    angle = position.to(tl.int64)
    if ROPE.has_positions:
        angle = tl.load(positions + token).to(tl.int64)
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    dimension = tl.arange(0, DIMENSIONS)
    within = dimension < HEAD_DIM
    pair = tl.where(dimension < HALF_DIM, dimension, dimension - HALF_DIM)
    angles = table + angle * HEAD_DIM + pair
    cosine = tl.load(angles, mask=within, other=0.0)
    sine = tl.load(angles + HALF_DIM, mask=within, other=0.0)
    sine = tl.where(dimension < HALF_DIM, -sine, sine)
    Q_HEAD: tl.constexpr = ROPE.q_head
    KV_ROWS: tl.constexpr = 0 if ROPE.queries_only else KV_HEADS * (HEAD_DIM + ROPE.value_dim)
    row = qkv + token.to(tl.int64) * (HEADS * Q_HEAD + KV_ROWS + ROPE.gate_rows)
    scale = tl.load(row_scales + token)
    q = _rope_heads(row, scale, bias, q_norm, epsilon, cosine, sine, HEADS, HEADS_2, Q_HEAD, ROPE)
    q = scaled_queries(q, query_weights, position, ROPE)
    if ROPE.key_type == Q4_0:
        q = hadamard_f16(q, HEAD_DIM).to(tl.float32)
    head = tl.arange(0, HEADS_2)[:, None]
    to = queries + (token.to(tl.int64) * HEADS + head) * HEAD_DIM + dimension[None, :]
    q = tl.minimum(tl.maximum(q, -65504.0), 65504.0).to(tl.float16)
    tl.store(to, q, mask=(head < HEADS) & within[None, :])
    if not ROPE.queries_only:
        _append(row, scale, bias, k_norm, epsilon, cosine, sine, cache, position, ROPE)


class ProjectedHeads(NamedTuple):
    """Heads before norm and RoPE: qkv (tokens, rows of q, k and v) is still to be multiplied by row_scales
    (tokens,); `bias` is for the whole row; q_norm and k_norm are weights of a head or of the row;
    query_weights are the factors of a head's query after RoPE.
    """

    qkv: torch.Tensor
    row_scales: torch.Tensor
    bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    query_weights: torch.Tensor | None = None


def rope_append(
    heads: ProjectedHeads,
    table: torch.Tensor,
    spec: AttentionSpec,
    words: torch.Tensor,
    queries: torch.Tensor,
    cache: CacheArgs,
    is_ring: bool = False,
    positions: torch.Tensor | None = None,
) -> None:
    """Queries (tokens, heads, head_dim) float16 from the projection; keys and values are written to the cache
    at the positions of the chunk, whose first is in its `words`.

    Pairs are (i, i + head_dim/2); `table` (positions, head_dim) float32: cosines, then sines. For a q4_0
    cache, queries are multiplied with the Hadamard matrix like the keys. `positions` (tokens,) int32: those
    for RoPE, if they aren't those in the cache.
    """
    normed = spec.qk_norm != "none" and heads.q_norm is not None
    padded_heads, dimensions = next_power_of_two(spec.heads), next_power_of_two(spec.head_dim)
    rope = RopeConfig(
        spec.heads, spec.kv_heads, padded_heads, next_power_of_two(spec.kv_heads), spec.head_dim,
        spec.q_head, dimensions, spec.value_dim, next_power_of_two(spec.value_dim),
        norm=int(NORMS[spec.norm.kind] if normed else NO_NORM),
        is_row_norm=spec.qk_norm == "row", has_bias=heads.bias is not None,
        key_type=int(CACHES[cache.k.dtype]), value_type=int(CACHES[cache.v.dtype]),
        temperature=spec.temperature.scale,
        temperature_length=spec.temperature.length, has_query_weights=heads.query_weights is not None,
        is_ring=is_ring, has_value_norm=spec.value_norm, queries_only=spec.source_layer is not None,
        has_positions=positions is not None, temperature_offset=spec.temperature.offset,
        gate_rows=spec.heads if spec.head_gated else 0, clamp=spec.clamp, is_paged=cache.pages is not None,
        has_recent=cache.recent is not None,
    )  # fmt: skip
    rope_append_kernel[(len(heads.qkv),)](
        *heads, table, queries, cache, words, positions, spec.norm.epsilon,
        ROPE=rope, num_warps=min(16, max(1, padded_heads * dimensions // 1024)),
    )  # fmt: skip
