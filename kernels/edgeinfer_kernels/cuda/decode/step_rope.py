"""Norms and RoPE of a decode step's queries and keys, the append of its keys and values to the cache, and
which of them each query attends to.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    F16,
    Q4_0,
    cache_rows,
    load_cache_tile,
    load_recent_tiles,
    recent_rows,
    store_cache_rows,
    store_recent_rows,
)
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    CACHED_AT,
    MASKS_AT,
    POSITIONS_AT,
    clamped,
    oldest_visible,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers

NEW = tl.constexpr(16)
"""Rows of the tile for the step's new tokens."""
NO_QK_NORM = tl.constexpr(0)
HEAD_QK_NORM = tl.constexpr(1)
ROW_QK_NORM = tl.constexpr(2)


@triton.jit
def _row_norm(row, WIDTH: tl.constexpr, epsilon):
    """1/√(mean + ε) over a whole row of q or k."""
    PADDED: tl.constexpr = triton.next_power_of_2(WIDTH)
    index = tl.arange(0, PADDED)
    value = tl.load(row + index, mask=index < WIDTH, other=0.0)
    return tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + epsilon)


@triton.jit
def rope_heads(
    base, token, mask, positions, rope, norm_weight, norm_at, row_inverse, ATTENTION: tl.constexpr
):
    """Heads (n, DIMENSIONS) float32 at pointers `base` (n,), with norm and the RoPE of their tokens'
    positions.

    `norm_at` (n,): offset of each head's norm weights; `row_inverse` (n,): the factor of a row norm.
    """
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    QK_NORM: tl.constexpr = ATTENTION.qk_norm
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    dimension = tl.arange(0, ATTENTION.dimensions)
    partner = tl.where(dimension < HALF_DIM, dimension + HALF_DIM, dimension - HALF_DIM)
    inside = mask[:, None] & (dimension < HEAD_DIM)[None, :]
    value = tl.load(base[:, None] + dimension[None, :], mask=inside, other=0.0)
    other = tl.load(base[:, None] + partner[None, :], mask=inside, other=0.0)
    value, other = clamped(value, ATTENTION.clamp), clamped(other, ATTENTION.clamp)
    if QK_NORM != NO_QK_NORM:
        if QK_NORM == HEAD_QK_NORM:
            inverse = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + rope.epsilon)
        else:
            inverse = row_inverse
        weight = norm_weight + norm_at[:, None]
        value *= inverse[:, None] * tl.load(weight + dimension[None, :], mask=inside, other=0.0)
        other *= inverse[:, None] * tl.load(weight + partner[None, :], mask=inside, other=0.0)
    position = tl.load(positions + token, mask=mask, other=0)
    pair = (dimension % HALF_DIM)[None, :]
    cosine = tl.load(rope.table + position[:, None] * HEAD_DIM + pair, mask=inside, other=0.0)
    sine = tl.load(rope.table + position[:, None] * HEAD_DIM + HALF_DIM + pair, mask=inside, other=0.0)
    sign = tl.where(dimension < HALF_DIM, -1.0, 1.0)[None, :]
    return value * cosine + other * sine * sign


@triton.jit
def row_inverses(
    row, stride, owner, count, TOKENS: tl.constexpr, WIDTH: tl.constexpr, QK_NORM: tl.constexpr, epsilon
):
    """The factors of a row norm, (n,): those of the rows of `owner`'s tokens, of which there are `count`; 1
    for other norms.
    """
    inverses = tl.zeros(owner.shape, tl.float32) + 1.0
    if QK_NORM == ROW_QK_NORM:
        for index in tl.static_range(TOKENS):
            if index < count:
                inverse = _row_norm(row + index * stride, WIDTH, epsilon)
                inverses = tl.where(owner == index, inverse, inverses)
    return inverses


@triton.jit
def append_new(
    qkv, stride, cache, pages, head, cached, count, positions, rope, ATTENTION: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The first `count` new keys (NEW, dimensions) and values (NEW, value_dimensions) of a head, TOKENS at
    most, as read back from the cache, in float16.

    They are appended to the cache, unless another layer has done that. For q4_0 the Hadamard transform is
    expensive, so padding rows are skipped.
    """
    if ATTENTION.queries_only:
        return _new_from_cache(cache, pages, head, cached, count, ATTENTION)
    else:
        return _append(qkv, stride, cache, pages, head, cached, count, positions, rope, ATTENTION, TOKENS)


@triton.jit
def _new_from_cache(cache, pages, head, cached, count, ATTENTION: tl.constexpr):
    """The step's new keys and values of a head in the cache."""
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    DIMENSIONS: tl.constexpr = ATTENTION.dimensions
    written = tl.arange(0, NEW) < count
    if ATTENTION.has_recent:
        key_tile, value_tile = load_recent_tiles(
            cached + tl.arange(0, NEW), written, cache, pages, head, ATTENTION
        )
    else:
        at = cache_rows(cached + tl.arange(0, NEW), cached, written, cache, pages, ATTENTION)
        key_tile = load_cache_tile(
            cache.k, cache.k_scales, head, at, written, cache.capacity, HEAD_DIM, DIMENSIONS,
            ATTENTION.key_type,
        )  # fmt: skip
        value_tile = load_cache_tile(
            cache.v, cache.v_scales, head, at, written, cache.capacity, ATTENTION.value_dim,
            ATTENTION.value_dimensions, ATTENTION.value_type,
        )  # fmt: skip
    return key_tile, value_tile


@triton.jit
def _append(
    qkv, stride, cache, pages, head, cached, count, positions, rope, ATTENTION: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Append the step's new keys and values of a head; return them as `append_new`."""
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    DIMENSIONS: tl.constexpr = ATTENTION.dimensions
    VALUE_DIM: tl.constexpr = ATTENTION.value_dim
    VALUE_DIMENSIONS: tl.constexpr = ATTENTION.value_dimensions
    QK_NORM: tl.constexpr = ATTENTION.qk_norm
    KEY_TYPE: tl.constexpr = ATTENTION.key_type
    VALUE_TYPE: tl.constexpr = ATTENTION.value_type
    ROWS: tl.constexpr = triton.next_power_of_2(TOKENS) if KEY_TYPE == Q4_0 or VALUE_TYPE == Q4_0 else NEW
    new = tl.arange(0, ROWS)
    written = new < count
    width: tl.constexpr = ATTENTION.kv_heads * HEAD_DIM
    inverses = row_inverses(qkv + ATTENTION.k_at, stride, new, count, TOKENS, width, QK_NORM, rope.epsilon)
    norm_at = new * 0 + (head * HEAD_DIM if QK_NORM == ROW_QK_NORM else 0)
    new_keys = rope_heads(
        qkv + new * stride + ATTENTION.k_at + head * HEAD_DIM,
        new,
        written,
        positions,
        rope,
        rope.k_norm,
        norm_at,
        inverses,
        ATTENTION,
    )
    dimension = tl.arange(0, VALUE_DIMENSIONS)
    inside = written[:, None] & (dimension < VALUE_DIM)[None, :]
    row = qkv + new * stride + ATTENTION.v_at + head * VALUE_DIM
    new_values = clamped(tl.load(row[:, None] + dimension[None, :], mask=inside, other=0.0), ATTENTION.clamp)
    if ATTENTION.has_value_norm:
        square = tl.sum(new_values * new_values, axis=1) / VALUE_DIM
        new_values *= tl.rsqrt(square + rope.epsilon)[:, None]
    rows = cache_rows(cached + new, cached, written, cache, pages, ATTENTION)
    to = head.to(tl.int64) * cache.capacity + rows
    store_cache_rows(cache.k, cache.k_scales, to, written, new_keys, HEAD_DIM, DIMENSIONS, KEY_TYPE)
    store_cache_rows(
        cache.v, cache.v_scales, to, written, new_values, VALUE_DIM, VALUE_DIMENSIONS, VALUE_TYPE
    )
    if ATTENTION.has_recent:
        near = recent_rows(cached + new, written, cache, pages, ATTENTION.is_paged)
        near = head.to(tl.int64) * cache.recent.capacity + near
        store_recent_rows(cache.recent.k, near, written, new_keys, HEAD_DIM, KEY_TYPE)
        store_recent_rows(cache.recent.v, near, written, new_values, VALUE_DIM, VALUE_TYPE)
    if KEY_TYPE != F16 or VALUE_TYPE != F16:
        tl.debug_barrier()
        key_tile, value_tile = _new_from_cache(cache, pages, head, cached, count, ATTENTION)
    else:
        key_tile, value_tile = new_keys.to(tl.float16), new_values.to(tl.float16)
    return key_tile, value_tile


@triton.jit
def visible_new(
    state, token, is_query, position, TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr = False,
):  # fmt: skip
    """Which of the step's new tokens each query attends to, (queries, NEW)."""
    new = tl.arange(0, NEW)
    sees = tl.load(state + MASKS_AT + token, mask=is_query, other=0)
    visible = ((sees[:, None] >> new[None, :]) & 1) != 0
    if WINDOW > 0:
        new_position = tl.load(state + POSITIONS_AT + new, mask=new < TOKENS, other=0)
        visible = visible & (new_position[None, :] >= oldest_visible(position, WINDOW, CHUNKED)[:, None])
    return visible


@triton.jit
def new_positions(state, token, is_query, position, TOKENS: tl.constexpr, ATTENTION: tl.constexpr):
    """`visible_new`, and the distance of each query from the step's new tokens, (queries, NEW)."""
    visible = visible_new(state, token, is_query, position, TOKENS, ATTENTION.window, ATTENTION.is_chunked)
    new = tl.arange(0, NEW)
    distance = position[:, None] - tl.load(state + POSITIONS_AT + new, mask=new < TOKENS, other=0)[None, :]
    return visible, distance


@triton.jit
def append_keys_kernel(
    qkv, stride, cache, state, rope,
    ATTENTION: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Append the keys and values of a step's TOKENS tokens to the cache; one program per KV head.

    `qkv` (tokens, stride) float32: q, which isn't read, then k and v.
    """
    release_consumers(DEPENDENT)
    head = tl.program_id(0)
    wait_for_producers(DEPENDENT)
    cached = tl.load(state + CACHED_AT)
    append_new(
        qkv, stride, cache, cache.pages, head, cached, TOKENS, state + POSITIONS_AT, rope, ATTENTION, TOKENS
    )
