"""Softmax attention over the cache: tiles of 64 positions, online, in pieces that are merged afterwards.

A *state* is what one query head has gathered from some positions: the largest score, the sum of exponentials
below it, and the values weighted by these exponentials (`STATE_BYTES` + 4 bytes a padded dimension). States
of different positions merge exactly. Source: Milakov and Gimelshein 2018; Dao et al. 2022, §3.1.

Keys lie in tiles of sixteen positions, dimension by dimension, so that a register holds sixteen positions and
no sum runs across lanes; values lie in rows.
"""

import numpy as np
from numba import config

from edgeinfer_kernels.cpu.native.cache_widening import widen_page
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.float_lanes import (
    add,
    lanes_max,
    lanes_sum,
    load_floats,
    load_halves,
    maximum,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.scalars import load_f32, load_i64, store_f32
from edgeinfer_kernels.cpu.native.vector_math import exponential, hyperbolic_tangent
from edgeinfer_kernels.cpu.structures import ATTENTION, CACHE_LINE
from edgeinfer_kernels.cpu.structures import POSITIONS_A_TILE as TILE

NEGATIVE = np.float32(-1e30)
LANES = 16
STATE_BYTES = CACHE_LINE
DECAY = 8
"""Where a state keeps by how much its values must shrink next, behind its largest score and its sum."""
SCORES_BYTES = 4 * TILE
"""Of one query head."""


@inner
def clear_states(states, group, padded):
    """States that have seen nothing, for `group` heads."""
    for g in range(group):
        state = states + g * (STATE_BYTES + 4 * padded)
        store_f32(state, NEGATIVE)
        store_f32(state + 4, np.float32(0))
        for d in range(0, padded, LANES):
            store_floats(state + STATE_BYTES + 4 * d, splat_f32(np.float32(0)))


@inner
def add_sink(state, score, padded):
    """One more score in the sum, with nothing for a value."""
    top = max(load_f32(state), score)
    kept = lanes_max(exponential(splat_f32(load_f32(state) - top)))
    sunk = lanes_max(exponential(splat_f32(score - top)))
    store_f32(state, top)
    store_f32(state + 4, load_f32(state + 4) * kept + sunk)
    for d in range(STATE_BYTES, STATE_BYTES + 4 * padded, 4 * LANES):
        store_floats(state + d, multiply(load_floats(state + d), splat_f32(kept)))


@inner
def merge_state(into, state, padded):
    """Add what `state` has gathered to `into`."""
    top = max(load_f32(into), load_f32(state))
    mine = lanes_max(exponential(splat_f32(load_f32(into) - top)))
    theirs = lanes_max(exponential(splat_f32(load_f32(state) - top)))
    store_f32(into, top)
    store_f32(into + 4, load_f32(into + 4) * mine + load_f32(state + 4) * theirs)
    for d in range(STATE_BYTES, STATE_BYTES + 4 * padded, 4 * LANES):
        kept = multiply(load_floats(into + d), splat_f32(mine))
        store_floats(into + d, multiply_add(load_floats(state + d), splat_f32(theirs), kept))


@inner
def write_states(states, group, head_dim, padded, out):
    """The weighted values divided by their sum: `group` heads of `head_dim` floats, side by side."""
    for g in range(group):
        state = states + g * (STATE_BYTES + 4 * padded)
        inverse = np.float32(1) / load_f32(state + 4)
        for d in range(head_dim):
            store_f32(out + 4 * (head_dim * g + d), load_f32(state + STATE_BYTES + 4 * d) * inverse)


@inner
def cap_scores(scores, scale, soft_cap):
    """scores = scale·scores, soft-capped; sixteen of them."""
    s = multiply(scores, splat_f32(scale))
    if soft_cap > np.float32(0):
        inside = multiply(s, splat_f32(np.float32(1) / soft_cap))
        s = multiply(splat_f32(soft_cap), hyperbolic_tangent(inside))
    return s


@inner
def mask_scores(scores, first, last):
    """Hide the positions of a tile before `first` and from `last`; returns the largest score left."""
    for i in range(first):
        store_f32(scores + 4 * i, NEGATIVE)
    for i in range(last, TILE):
        store_f32(scores + 4 * i, NEGATIVE)
    largest = splat_f32(NEGATIVE)
    for i in range(0, TILE, LANES):
        largest = maximum(largest, load_floats(scores + 4 * i))
    return lanes_max(largest)


@inner
def exponentiate(scores, top):
    """scores = exp(score - top), 0 where hidden; returns their sum."""
    total = splat_f32(np.float32(0))
    for i in range(0, TILE, LANES):
        weight = exponential(subtract(load_floats(scores + 4 * i), splat_f32(top)))
        store_floats(scores + 4 * i, weight)
        total = add(total, weight)
    return lanes_sum(total)


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


def make_score_tiles(load_cached, element_bytes):
    """Scores of one query head, and of four that share their keys, with the 64 positions at `keys`."""
    row_bytes = element_bytes * LANES
    load_four = make_load_four(load_cached)

    @inner
    def score_one(query, keys, head_dim, padded, scale, soft_cap, scores):
        total = four_zeros()
        for d in range(head_dim):
            key = load_four(keys + row_bytes * d, row_bytes * padded)
            total = add_products(query + 4 * d, key, total)
        store_capped(scores, total, scale, soft_cap)

    @inner
    def score_four(query, keys, head_dim, padded, scale, soft_cap, scores):
        t0 = four_zeros()
        t1 = four_zeros()
        t2 = four_zeros()
        t3 = four_zeros()
        for d in range(head_dim):
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

    @inner
    def add_one(weights, values, first, last, padded, state):
        decay = load_f32(state + DECAY)
        mixed = state + STATE_BYTES
        whole = padded // 64 * 64
        for d in range(0, whole, 64):
            total = scaled_four(mixed + 4 * d, decay)
            for i in range(first, last):
                value = load_four(values + element_bytes * (padded * i + d), row_bytes)
                total = add_products(weights + 4 * i, value, total)
            store_four(mixed + 4 * d, total)
        for d in range(whole, padded, LANES):
            m = multiply(load_floats(mixed + 4 * d), splat_f32(decay))
            for i in range(first, last):
                cached = load_cached(values + element_bytes * (padded * i + d))
                m = multiply_add(splat_f32(load_f32(weights + 4 * i)), cached, m)
            store_floats(mixed + 4 * d, m)

    @inner
    def add_four(weights, values, first, last, padded, state):
        """For padded head dimensions that are whole multiples of 64."""
        step = STATE_BYTES + 4 * padded
        for d in range(0, padded, 64):
            mixed = state + STATE_BYTES + 4 * d
            t0 = scaled_four(mixed, load_f32(state + DECAY))
            t1 = scaled_four(mixed + step, load_f32(state + step + DECAY))
            t2 = scaled_four(mixed + 2 * step, load_f32(state + 2 * step + DECAY))
            t3 = scaled_four(mixed + 3 * step, load_f32(state + 3 * step + DECAY))
            for i in range(first, last):
                value = load_four(values + element_bytes * (padded * i + d), row_bytes)
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
def weigh_scores(state, scores, first, last):
    """Scores of a tile to weights below the largest yet; the state's largest, sum and decay follow."""
    top = max(load_f32(state), mask_scores(scores, first, last))
    decay = lanes_max(exponential(splat_f32(load_f32(state) - top)))
    total = exponentiate(scores, top)
    store_f32(state, top)
    store_f32(state + 4, load_f32(state + 4) * decay + total)
    store_f32(state + DECAY, decay)


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


def make_gather(load_cached, element_bytes, *, wide, widens=False):
    """What query heads gather from a range of positions, for a cache of one element type.

    `widens`: the cache is in bytes, and each tile becomes float32 before it is looked at.

    `wide`: the target has 32 registers of 64 bytes, enough for four heads at once.
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
        together = group // 4 * 4 if wide and padded % 64 == 0 else 0
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
                score_four(query + 4 * padded * g, keys, head_dim, padded, scale, soft_cap, scores)
                for head in range(4):
                    weigh_scores(state + head * step, scores + head * SCORES_BYTES, first, last)
                add_four(scores, values, first, last, padded, state)
            for g in range(together, group):
                state = states + g * step
                score_one(query + 4 * padded * g, keys, head_dim, padded, scale, soft_cap, scores)
                weigh_scores(state, scores, first, last)
                add_one(scores, values, first, last, padded, state)

    return gather


WIDE = "+avx512f" in (config.CPU_FEATURES or "")
gather_halves = make_gather(load_halves, 2, wide=WIDE)
gather_floats = make_gather(load_floats, 4, wide=WIDE)
gather_bytes = make_gather(load_floats, 4, wide=WIDE, widens=True)
