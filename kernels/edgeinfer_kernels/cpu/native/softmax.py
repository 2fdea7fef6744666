"""Softmax attention over the cache: tiles of 64 positions, online, gathered in `attention_states.py`.

Keys lie in tiles of sixteen positions, dimension by dimension, so that a register holds sixteen positions and
no sum runs across lanes; values lie in rows.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.attention_states import DECAY, STATE_BYTES, weigh_scores
from edgeinfer_kernels.cpu.native.cache_widening import widen_page
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.float_lanes import (
    load_floats,
    load_halves,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.scalars import has_wide_registers, load_f32, load_i64, prefetch
from edgeinfer_kernels.cpu.native.vector_math import hyperbolic_tangent
from edgeinfer_kernels.cpu.structures import ATTENTION, CACHE_LINE
from edgeinfer_kernels.cpu.structures import POSITIONS_A_TILE as TILE

LANES = 16
SCORES_BYTES = 4 * TILE
"""Of one query head."""


@inner
def cap_scores(scores, scale, soft_cap):
    """scores = scale·scores, soft-capped; sixteen of them."""
    s = multiply(scores, splat_f32(scale))
    if soft_cap > np.float32(0):
        inside = multiply(s, splat_f32(np.float32(1) / soft_cap))
        s = multiply(splat_f32(soft_cap), hyperbolic_tangent(inside))
    return s


@inner
def four_zeros():
    zero = splat_f32(np.float32(0))
    return zero, zero, zero, zero


@inner
def scaled_four(at, factor):
    """Sixty-four floats times a factor."""
    f = splat_f32(factor)
    return (
        multiply(load_floats(at), f),
        multiply(load_floats(at + 64), f),
        multiply(load_floats(at + 128), f),
        multiply(load_floats(at + 192), f),
    )


@inner
def store_four(at, x):
    store_floats(at, x[0])
    store_floats(at + 64, x[1])
    store_floats(at + 128, x[2])
    store_floats(at + 192, x[3])


@inner
def add_products(factor, x, total):
    """total + factor·x, for the float32 at the address `factor`."""
    f = splat_f32(load_f32(factor))
    return (
        multiply_add(f, x[0], total[0]),
        multiply_add(f, x[1], total[1]),
        multiply_add(f, x[2], total[2]),
        multiply_add(f, x[3], total[3]),
    )


@inner
def store_capped(scores, x, scale, soft_cap):
    store_floats(scores, cap_scores(x[0], scale, soft_cap))
    store_floats(scores + 64, cap_scores(x[1], scale, soft_cap))
    store_floats(scores + 128, cap_scores(x[2], scale, soft_cap))
    store_floats(scores + 192, cap_scores(x[3], scale, soft_cap))


def make_load_four(load_cached):
    @inner
    def load_four(at, stride):
        return (
            load_cached(at),
            load_cached(at + stride),
            load_cached(at + 2 * stride),
            load_cached(at + 3 * stride),
        )

    return load_four


def make_prefetch(nbytes):
    """`prefetch_next(at, step, ahead)`: asks for the `step`-th `nbytes` of what lies `ahead` of `at`, if that
    isn't 0.

    A cache's tiles are read once, in order, but in runs too short for the processor to see that.
    """

    @inner
    def prefetch_next(at, step, ahead):
        if ahead != 0:
            for line in range(0, nbytes, CACHE_LINE):
                prefetch(at + ahead + nbytes * step + line)

    return prefetch_next


def make_score_tiles(load_cached, element_bytes):
    """Scores of one query head, and of four that share their keys, with the 64 positions at `keys`; of which
    the next lie `ahead`, or 0.
    """
    row_bytes = element_bytes * LANES
    load_four = make_load_four(load_cached)
    prefetch_next = make_prefetch(4 * row_bytes)

    @inner
    def score_one(query, keys, ahead, head_dim, padded, scale, soft_cap, scores):
        total = four_zeros()
        for d in range(head_dim):
            prefetch_next(keys, d, ahead)
            key = load_four(keys + row_bytes * d, row_bytes * padded)
            total = add_products(query + 4 * d, key, total)
        store_capped(scores, total, scale, soft_cap)

    @inner
    def score_four(query, keys, ahead, head_dim, padded, scale, soft_cap, scores):
        t0 = four_zeros()
        t1 = four_zeros()
        t2 = four_zeros()
        t3 = four_zeros()
        for d in range(head_dim):
            prefetch_next(keys, d, ahead)
            key = load_four(keys + row_bytes * d, row_bytes * padded)
            q = query + 4 * d
            t0 = add_products(q, key, t0)
            t1 = add_products(q + 4 * padded, key, t1)
            t2 = add_products(q + 8 * padded, key, t2)
            t3 = add_products(q + 12 * padded, key, t3)
        store_capped(scores, t0, scale, soft_cap)
        store_capped(scores + SCORES_BYTES, t1, scale, soft_cap)
        store_capped(scores + 2 * SCORES_BYTES, t2, scale, soft_cap)
        store_capped(scores + 3 * SCORES_BYTES, t3, scale, soft_cap)

    return score_one, score_four


def make_add_values(load_cached, element_bytes):
    """mixed = mixed·decay + Σ weight·value for one query head, and for four that share their values.

    A head's weights lie SCORES_BYTES, its state a state's bytes behind the head's before; its decay is kept
    at byte DECAY of the state.
    """
    row_bytes = element_bytes * LANES
    load_four = make_load_four(load_cached)
    prefetch_next = make_prefetch(4 * row_bytes)

    @inner
    def add_one(weights, values, ahead, first, last, padded, state):
        decay = load_f32(state + DECAY)
        mixed = state + STATE_BYTES
        whole = padded // 64 * 64
        for d in range(0, whole, 64):
            total = scaled_four(mixed + 4 * d, decay)
            for i in range(first, last):
                at = values + element_bytes * (padded * i + d)
                prefetch_next(at, 0, ahead)
                value = load_four(at, row_bytes)
                total = add_products(weights + 4 * i, value, total)
            store_four(mixed + 4 * d, total)
        for d in range(whole, padded, LANES):
            m = multiply(load_floats(mixed + 4 * d), splat_f32(decay))
            for i in range(first, last):
                cached = load_cached(values + element_bytes * (padded * i + d))
                m = multiply_add(splat_f32(load_f32(weights + 4 * i)), cached, m)
            store_floats(mixed + 4 * d, m)

    @inner
    def add_four(weights, values, ahead, first, last, padded, state):
        """For padded head dimensions that are whole multiples of 64."""
        step = STATE_BYTES + 4 * padded
        for d in range(0, padded, 64):
            mixed = state + STATE_BYTES + 4 * d
            t0 = scaled_four(mixed, load_f32(state + DECAY))
            t1 = scaled_four(mixed + step, load_f32(state + step + DECAY))
            t2 = scaled_four(mixed + 2 * step, load_f32(state + 2 * step + DECAY))
            t3 = scaled_four(mixed + 3 * step, load_f32(state + 3 * step + DECAY))
            for i in range(first, last):
                at = values + element_bytes * (padded * i + d)
                prefetch_next(at, 0, ahead)
                value = load_four(at, row_bytes)
                w = weights + 4 * i
                t0 = add_products(w, value, t0)
                t1 = add_products(w + SCORES_BYTES, value, t1)
                t2 = add_products(w + 2 * SCORES_BYTES, value, t2)
                t3 = add_products(w + 3 * SCORES_BYTES, value, t3)
            store_four(mixed, t0)
            store_four(mixed + step, t1)
            store_four(mixed + 2 * step, t2)
            store_four(mixed + 3 * step, t3)

    return add_one, add_four


@inner
def first_of_neighbours(pages, count):
    """The first of `count` pages if each is followed by the next in the cache, else -1."""
    first = load_i64(pages)
    for i in range(1, count):
        if load_i64(pages + 8 * i) != first + i:
            return -1
    return first


@inner
def copy_lines(source, target, nbytes):
    """Whole cache lines."""
    for offset in range(0, nbytes, CACHE_LINE):
        store_floats(target + offset, load_floats(source + offset))


def make_gather(load_cached, element_bytes, *, widens=False):
    """What query heads gather from a range of positions, for a cache of one element type.

    `widens`: the cache is in bytes, and each tile becomes float32 before it is looked at.
    """
    row_bytes = element_bytes * LANES
    score_one, score_four = make_score_tiles(load_cached, element_bytes)
    add_one, add_four = make_add_values(load_cached, element_bytes)

    @inner
    def gather(block, query, kv_head, begin, end, pages, states, scores, copied):
        """Add positions begin..end to the states of the query heads that share `kv_head`.

        Reads each key and value of the range once, whatever the number of heads that share them. `pages`: 0,
        or where each sixteen positions lie; a tile of several that aren't neighbours is put together at
        `copied`, so that its sums are the same to the last bit.
        """
        padded = load_i64(block + ATTENTION.padded_head)
        head_dim = load_i64(block + ATTENTION.head_dim)
        group = load_i64(block + ATTENTION.heads) // load_i64(block + ATTENTION.kv_heads)
        context = load_i64(block + ATTENTION.context)
        scale = load_f32(block + ATTENTION.scale)
        soft_cap = load_f32(block + ATTENTION.soft_cap)
        step = STATE_BYTES + 4 * padded
        # Four heads at once take 32 registers of 64 bytes.
        together = group // 4 * 4 if has_wide_registers() != 0 and padded % 64 == 0 else 0
        page_bytes = row_bytes * padded
        key_cache = load_i64(block + ATTENTION.key_cache) + page_bytes * kv_head * (context // LANES)
        value_cache = load_i64(block + ATTENTION.value_cache) + page_bytes * kv_head * (context // LANES)
        for tile in range(begin // LANES * LANES, end, TILE):
            first = max(0, begin - tile)
            last = min(TILE, end - tile)
            page = tile // LANES
            count = (last + LANES - 1) // LANES
            if pages != 0:
                page = first_of_neighbours(pages + 8 * page, count)
            keys = key_cache + page_bytes * page
            values = value_cache + page_bytes * page
            ahead = 0 if widens else TILE // LANES * page_bytes
            if widens:
                keys = copied
                values = copied + TILE // LANES * page_bytes
                for i in range(count):
                    page = tile // LANES + i
                    if pages != 0:
                        page = load_i64(pages + 8 * page)
                    offset = page_bytes * i
                    widen_page(block, kv_head, page, padded, keys + offset, values + offset, scores)
            elif page < 0:
                keys = copied
                values = copied + TILE // LANES * page_bytes
                for i in range(count):
                    page = load_i64(pages + 8 * (tile // LANES + i))
                    copy_lines(key_cache + page_bytes * page, keys + page_bytes * i, page_bytes)
                    copy_lines(value_cache + page_bytes * page, values + page_bytes * i, page_bytes)
            for g in range(0, together, 4):
                state = states + g * step
                score_four(query + 4 * padded * g, keys, ahead, head_dim, padded, scale, soft_cap, scores)
                for head in range(4):
                    weigh_scores(state + head * step, scores + head * SCORES_BYTES, first, last)
                add_four(scores, values, ahead, first, last, padded, state)
            for g in range(together, group):
                state = states + g * step
                score_one(query + 4 * padded * g, keys, ahead, head_dim, padded, scale, soft_cap, scores)
                weigh_scores(state, scores, first, last)
                add_one(scores, values, ahead, first, last, padded, state)

    return gather


gather_halves = make_gather(load_halves, 2)
gather_floats = make_gather(load_floats, 4)
gather_bytes = make_gather(load_floats, 4, widens=True)
