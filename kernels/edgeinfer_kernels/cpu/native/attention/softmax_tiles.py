"""Functions of the online softmax over tiles of 64 positions, for elements of any type.

Keys are in tiles of sixteen positions, dimension by dimension, so that a register holds sixteen positions and
no sum across lanes is needed; values are in rows. The code for 8-bit caches is in `softmax_q8_0.py`, for
4-bit caches in `softmax_q4_0.py`.
"""

from edgeinfer_kernels.cpu.native.attention.attention_states import (
    DECAY,
    STATE_BYTES,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.four_vectors import (
    add_products,
    add_two_products,
    cap_scores,
    four_zeros,
    make_load_four,
    make_prefetch,
    scaled_four,
    store_four,
    store_two,
    two_zeros,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.runtime.abi import SCORES_BYTES

LANES = 16
HALF = 2 * LANES
"""Positions of half a tile."""
ALL_DIMENSIONS = 1 << 30
"""Larger than any head_dim."""


def make_score_tiles(load_four, row_bytes, dimensions, put, *, add=add_products, in_row=1, load_two=None):
    """Score functions for one query head, and for four that share their keys, over the positions before
    `last` of the 64 at `keys`; the next tile is `ahead` bytes further, for prefetch; 0: there is none.

    A row has the elements of `in_row` dimensions for sixteen positions. `load_four(at, stride)` returns four
    rows, `add(query, row, total)` adds their products. Products are summed over `dimensions` at a time;
    `put(scores, sums, scales, begin, padded)` adds the sums from dimension `begin` on to 64 scores. `spare`:
    scratch memory, unused here. `load_two`: as `load_four`, for elements without scales, which then are
    multiplied for 32 positions only if there are no more.
    """
    prefetch_next = make_prefetch(4 * row_bytes)
    score_half = None if load_two is None else make_score_half(load_two, row_bytes)

    @device_function
    def score_one(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, last, scores):
        for begin in range(0, head_dim, dimensions):
            total = four_zeros()
            for d in range(begin, min(head_dim, begin + dimensions), in_row):
                prefetch_next(keys, d // in_row, ahead)
                key = load_four(keys + row_bytes * (d // in_row), row_bytes * (padded // in_row))
                total = add(query + 4 * d, key, total)
            put(scores, total, scales, begin, padded)
        cap_scores(scores, scale, soft_cap, last)

    @device_function
    def score_four(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, last, scores):
        for begin in range(0, head_dim, dimensions):
            t0 = four_zeros()
            t1 = four_zeros()
            t2 = four_zeros()
            t3 = four_zeros()
            for d in range(begin, min(head_dim, begin + dimensions), in_row):
                prefetch_next(keys, d // in_row, ahead)
                key = load_four(keys + row_bytes * (d // in_row), row_bytes * (padded // in_row))
                q = query + 4 * d
                t0 = add(q, key, t0)
                t1 = add(q + 4 * padded, key, t1)
                t2 = add(q + 8 * padded, key, t2)
                t3 = add(q + 12 * padded, key, t3)
            put(scores, t0, scales, begin, padded)
            put(scores + SCORES_BYTES, t1, scales, begin, padded)
            put(scores + 2 * SCORES_BYTES, t2, scales, begin, padded)
            put(scores + 3 * SCORES_BYTES, t3, scales, begin, padded)
        for head in range(4):
            cap_scores(scores + head * SCORES_BYTES, scale, soft_cap, last)

    if score_half is None:
        return score_one, score_four

    @device_function
    def score_some(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, last, scores):
        if last > HALF:
            score_four(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, last, scores)
        else:
            score_half(query, keys, head_dim, padded, scale, soft_cap, last, scores)

    return score_one, score_some


def make_score_half(load_two, row_bytes):
    """`score_four` for a last tile of at most HALF positions, without scales: half the products."""

    @device_function
    def score_half(query, keys, head_dim, padded, scale, soft_cap, last, scores):
        t0 = two_zeros()
        t1 = two_zeros()
        t2 = two_zeros()
        t3 = two_zeros()
        for d in range(head_dim):
            key = load_two(keys + row_bytes * d, row_bytes * padded)
            q = query + 4 * d
            t0 = add_two_products(q, key, t0)
            t1 = add_two_products(q + 4 * padded, key, t1)
            t2 = add_two_products(q + 8 * padded, key, t2)
            t3 = add_two_products(q + 12 * padded, key, t3)
        store_two(scores, t0)
        store_two(scores + SCORES_BYTES, t1)
        store_two(scores + 2 * SCORES_BYTES, t2)
        store_two(scores + 3 * SCORES_BYTES, t3)
        for head in range(4):
            cap_scores(scores + head * SCORES_BYTES, scale, soft_cap, last)

    return score_half


def make_row_loads(load_cached, element_bytes):
    """Row access for values whose elements have `element_bytes` bytes each: the bytes of a number of
    elements; loads of sixty-four and of sixteen elements of a row; bytes of sixty-four.
    """
    load_four_of = make_load_four(load_cached)

    @device_function
    def row_bytes(elements):
        return element_bytes * elements

    @device_function
    def load_four(row, d):
        return load_four_of(row + element_bytes * d, element_bytes * LANES)

    @device_function
    def load_one(row, d):
        return load_cached(row + element_bytes * d)

    return row_bytes, load_four, load_one, 4 * LANES * element_bytes


def make_add_values(rows, factors_of, add, pitch):
    """attn_out = attn_out·decay + Σ factor·value for one query head, and for four that share their values.

    The weights of successive heads are SCORES_BYTES apart, their states one state's bytes; the decay is at
    byte DECAY of the state. `factors_of(weights, scales, padded, d, heads, spare)`: address of the factors of
    elements from `d` on, with heads `pitch` bytes apart; `add(factor, values, total)` adds 64 elements.
    `rows`: the result of `make_row_loads`. A value has `padded` elements, the first of a row of `width`.
    """
    row_bytes, load_four, load_one, elements_bytes = rows
    prefetch_next = make_prefetch(elements_bytes)

    @device_function
    def add_one(weights, values, scales, spare, ahead, first, last, padded, width, state):
        decay = load_f32(state + DECAY)
        attn_out = state + STATE_BYTES
        whole = padded // 64 * 64
        for d in range(0, whole, 64):
            factors = factors_of(weights, scales, width, d, 1, spare)
            total = scaled_four(attn_out + 4 * d, decay)
            for i in range(first, last):
                row = values + row_bytes(width) * i
                prefetch_next(row + row_bytes(d), 0, ahead)
                total = add(factors + 4 * i, load_four(row, d), total)
            store_four(attn_out + 4 * d, total)
        for d in range(whole, padded, LANES):
            factors = factors_of(weights, scales, width, d, 1, spare)
            m = multiply(load_floats(attn_out + 4 * d), splat_f32(decay))
            for i in range(first, last):
                cached = load_one(values + row_bytes(width) * i, d)
                m = multiply_add(splat_f32(load_f32(factors + 4 * i)), cached, m)
            store_floats(attn_out + 4 * d, m)

    @device_function
    def add_four(weights, values, scales, spare, ahead, first, last, padded, width, state):
        """For padded head dimensions that are whole multiples of 64."""
        step = STATE_BYTES + 4 * padded
        for d in range(0, padded, 64):
            factors = factors_of(weights, scales, width, d, 4, spare)
            attn_out = state + STATE_BYTES + 4 * d
            t0 = scaled_four(attn_out, load_f32(state + DECAY))
            t1 = scaled_four(attn_out + step, load_f32(state + step + DECAY))
            t2 = scaled_four(attn_out + 2 * step, load_f32(state + 2 * step + DECAY))
            t3 = scaled_four(attn_out + 3 * step, load_f32(state + 3 * step + DECAY))
            for i in range(first, last):
                row = values + row_bytes(width) * i
                prefetch_next(row + row_bytes(d), 0, ahead)
                value = load_four(row, d)
                f = factors + 4 * i
                t0 = add(f, value, t0)
                t1 = add(f + pitch, value, t1)
                t2 = add(f + 2 * pitch, value, t2)
                t3 = add(f + 3 * pitch, value, t3)
            store_four(attn_out, t0)
            store_four(attn_out + step, t1)
            store_four(attn_out + 2 * step, t2)
            store_four(attn_out + 3 * step, t3)

    return add_one, add_four


@device_function
def put_sums(scores, sums, scales, begin, padded):
    """For elements without scales: the sums are the scores."""
    store_four(scores, sums)


@device_function
def weights_alone(weights, scales, padded, d, heads, spare):
    """For elements without scales: the weights are the factors."""
    return weights
