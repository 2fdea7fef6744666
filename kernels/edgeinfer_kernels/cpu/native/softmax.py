"""Softmax attention over the cache: tiles of 64 positions, online, in pieces that are merged afterwards.

A *state* is what one query head has gathered from some positions: the largest score, the sum of exponentials
below it, and the values weighted by these exponentials (`STATE_BYTES` + 4 bytes a padded dimension). States
of different positions merge exactly. Source: Milakov and Gimelshein 2018; Dao et al. 2022, §3.1.

Keys lie in tiles of sixteen positions, dimension by dimension, so that a register holds sixteen positions and
no sum runs across lanes; values lie in rows.
"""

import numpy as np

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


def make_gather(load_cached, element_bytes):
    """What query heads gather from a range of positions, for a cache of one element type."""
    row_bytes = element_bytes * LANES

    @inner
    def score_tile(query, keys, head_dim, padded, scale, soft_cap, scores):
        """scores[i] = scale·(q·k_i), soft-capped, for the 64 positions at `keys`."""
        tile_bytes = row_bytes * padded
        s0 = splat_f32(np.float32(0))
        s1 = splat_f32(np.float32(0))
        s2 = splat_f32(np.float32(0))
        s3 = splat_f32(np.float32(0))
        for d in range(head_dim):
            q = splat_f32(load_f32(query + 4 * d))
            key = keys + row_bytes * d
            s0 = multiply_add(q, load_cached(key), s0)
            s1 = multiply_add(q, load_cached(key + tile_bytes), s1)
            s2 = multiply_add(q, load_cached(key + 2 * tile_bytes), s2)
            s3 = multiply_add(q, load_cached(key + 3 * tile_bytes), s3)
        store_floats(scores, cap_scores(s0, scale, soft_cap))
        store_floats(scores + 64, cap_scores(s1, scale, soft_cap))
        store_floats(scores + 128, cap_scores(s2, scale, soft_cap))
        store_floats(scores + 192, cap_scores(s3, scale, soft_cap))

    @inner
    def add_values_64(weights, values, first, last, padded, decay, mixed):
        """mixed = mixed·decay + Σ weight·value, for 64 dimensions at once."""
        m0 = multiply(load_floats(mixed), splat_f32(decay))
        m1 = multiply(load_floats(mixed + 64), splat_f32(decay))
        m2 = multiply(load_floats(mixed + 128), splat_f32(decay))
        m3 = multiply(load_floats(mixed + 192), splat_f32(decay))
        for i in range(first, last):
            w = splat_f32(load_f32(weights + 4 * i))
            value = values + element_bytes * padded * i
            m0 = multiply_add(w, load_cached(value), m0)
            m1 = multiply_add(w, load_cached(value + row_bytes), m1)
            m2 = multiply_add(w, load_cached(value + 2 * row_bytes), m2)
            m3 = multiply_add(w, load_cached(value + 3 * row_bytes), m3)
        store_floats(mixed, m0)
        store_floats(mixed + 64, m1)
        store_floats(mixed + 128, m2)
        store_floats(mixed + 192, m3)

    @inner
    def add_values(weights, values, first, last, padded, decay, mixed):
        """mixed = mixed·decay + Σ weight·value."""
        whole = padded // 64 * 64
        for d in range(0, whole, 64):
            at = values + element_bytes * d
            add_values_64(weights, at, first, last, padded, decay, mixed + 4 * d)
        for d in range(whole, padded, LANES):
            m = multiply(load_floats(mixed + 4 * d), splat_f32(decay))
            for i in range(first, last):
                cached = load_cached(values + element_bytes * (padded * i + d))
                m = multiply_add(splat_f32(load_f32(weights + 4 * i)), cached, m)
            store_floats(mixed + 4 * d, m)

    @inner
    def gather(block, query, kv_head, begin, end, states, scores):
        """Add positions begin..end to the states of the query heads that share `kv_head`.

        Reads each key and value of the range once, whatever the number of heads that share them.
        """
        padded = load_i64(block + ATTENTION.padded_head)
        head_dim = load_i64(block + ATTENTION.head_dim)
        group = load_i64(block + ATTENTION.heads) // load_i64(block + ATTENTION.kv_heads)
        context = load_i64(block + ATTENTION.context)
        scale = load_f32(block + ATTENTION.scale)
        soft_cap = load_f32(block + ATTENTION.soft_cap)
        for tile in range(begin // LANES * LANES, end, TILE):
            first = max(0, begin - tile)
            last = min(TILE, end - tile)
            keys = load_i64(block + ATTENTION.key_cache)
            keys += row_bytes * padded * (kv_head * (context // LANES) + tile // LANES)
            values = load_i64(block + ATTENTION.value_cache)
            values += element_bytes * padded * (kv_head * context + tile)
            for g in range(group):
                state = states + g * (STATE_BYTES + 4 * padded)
                score_tile(query + 4 * padded * g, keys, head_dim, padded, scale, soft_cap, scores)
                top = max(load_f32(state), mask_scores(scores, first, last))
                decay = lanes_max(exponential(splat_f32(load_f32(state) - top)))
                total = exponentiate(scores, top)
                add_values(scores, values, first, last, padded, decay, state + STATE_BYTES)
                store_f32(state, top)
                store_f32(state + 4, load_f32(state + 4) * decay + total)

    return gather


gather_halves = make_gather(load_halves, 2)
gather_floats = make_gather(load_floats, 4)
