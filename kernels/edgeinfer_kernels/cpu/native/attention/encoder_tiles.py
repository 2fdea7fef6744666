"""Scores, softmax and sums of values of a few queries that share the keys of a tile, for encoders.

Scores: S = Q·Kᵀ, sixteen keys in a register, so a key is read once for four queries. Values: O = P·V, sixteen
or, with registers of 64 bytes, sixty-four elements of a value at a time.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.attention.attention_states import LANES, NEGATIVE
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    absolute,
    add,
    lanes_max,
    lanes_sum,
    load_floats,
    maximum,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
    subtract_product,
)
from edgeinfer_kernels.cpu.native.simd.four_vectors import add_products, scaled_four, store_four
from edgeinfer_kernels.cpu.native.simd.scalars import has_wide_registers, load_f32, store_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential
from edgeinfer_kernels.cpu.runtime.abi import ENCODER_KEYS, ENCODER_QUERIES

ROW = 4 * ENCODER_KEYS
"""Bytes of the scores of a query."""


@device_function
def score_page(q0, q1, q2, q3, keys, head_dim, scores):
    """The products of four queries with sixteen keys, to `scores` of each query."""
    t0 = splat_f32(np.float32(0))
    t1 = splat_f32(np.float32(0))
    t2 = splat_f32(np.float32(0))
    t3 = splat_f32(np.float32(0))
    for d in range(head_dim):
        key = load_floats(keys + 64 * d)
        t0 = multiply_add(splat_f32(load_f32(q0 + 4 * d)), key, t0)
        t1 = multiply_add(splat_f32(load_f32(q1 + 4 * d)), key, t1)
        t2 = multiply_add(splat_f32(load_f32(q2 + 4 * d)), key, t2)
        t3 = multiply_add(splat_f32(load_f32(q3 + 4 * d)), key, t3)
    store_floats(scores, t0)
    store_floats(scores + ROW, t1)
    store_floats(scores + 2 * ROW, t2)
    store_floats(scores + 3 * ROW, t3)


@device_function
def score_two_pages(q0, q1, q2, q3, keys, page_bytes, head_dim, scores):
    """As `score_page`, for two pages: enough independent sums for two multipliers of 64 bytes."""
    t0 = splat_f32(np.float32(0))
    t1 = splat_f32(np.float32(0))
    t2 = splat_f32(np.float32(0))
    t3 = splat_f32(np.float32(0))
    u0 = splat_f32(np.float32(0))
    u1 = splat_f32(np.float32(0))
    u2 = splat_f32(np.float32(0))
    u3 = splat_f32(np.float32(0))
    for d in range(head_dim):
        key = load_floats(keys + 64 * d)
        other = load_floats(keys + page_bytes + 64 * d)
        f0 = splat_f32(load_f32(q0 + 4 * d))
        f1 = splat_f32(load_f32(q1 + 4 * d))
        f2 = splat_f32(load_f32(q2 + 4 * d))
        f3 = splat_f32(load_f32(q3 + 4 * d))
        t0 = multiply_add(f0, key, t0)
        t1 = multiply_add(f1, key, t1)
        t2 = multiply_add(f2, key, t2)
        t3 = multiply_add(f3, key, t3)
        u0 = multiply_add(f0, other, u0)
        u1 = multiply_add(f1, other, u1)
        u2 = multiply_add(f2, other, u2)
        u3 = multiply_add(f3, other, u3)
    store_floats(scores, t0)
    store_floats(scores + ROW, t1)
    store_floats(scores + 2 * ROW, t2)
    store_floats(scores + 3 * ROW, t3)
    store_floats(scores + 64, u0)
    store_floats(scores + ROW + 64, u1)
    store_floats(scores + 2 * ROW + 64, u2)
    store_floats(scores + 3 * ROW + 64, u3)


@device_function
def score_keys(block, head, row, count, tile, last, keys, scores):
    """The scores of up to four queries from `row` on with the keys tile…last, whose pages begin at `keys`."""
    head_dim, page_bytes, stride = block.head_dim, block.page_bytes, block.query_stride
    q0 = block.queries + row * stride + 4 * block.padded_head * head
    q1 = q0 + min(1, count - 1) * stride
    q2 = q0 + min(2, count - 1) * stride
    q3 = q0 + min(3, count - 1) * stride
    pages = (last - tile + LANES - 1) // LANES
    page = 0
    if has_wide_registers() != 0:
        while page + 1 < pages:
            at = keys + page * page_bytes
            score_two_pages(q0, q1, q2, q3, at, page_bytes, head_dim, scores + 64 * page)
            page += 2
    while page < pages:
        score_page(q0, q1, q2, q3, keys + page * page_bytes, head_dim, scores + 64 * page)
        page += 1
    if block.slopes != 0:
        slope = splat_f32(load_f32(block.slopes + 4 * head))
        lanes = load_floats(block.lane_indices)
        for q in range(ENCODER_QUERIES):
            for key in range(0, last - tile, LANES):
                distance = absolute(add(lanes, splat_f32(np.float32(tile + key - row - q))))
                at = scores + ROW * q + 4 * key
                store_floats(at, subtract_product(slope, distance, load_floats(at)))


@device_function
def weigh_tile(scores, low, high, count, sums):
    """Convert the scores of a query's tile of `count` keys to weights relative to the running maximum; those
    before `low` and from `high` on are masked. Updates the maximum and the sum at `sums`, and writes the
    factor of earlier values after them.
    """
    padded = (count + LANES - 1) // LANES * LANES
    for i in range(min(low, padded)):
        store_f32(scores + 4 * i, NEGATIVE)
    for i in range(max(0, min(high, count)), padded):
        store_f32(scores + 4 * i, NEGATIVE)
    largest = splat_f32(load_f32(sums))
    for i in range(0, padded, LANES):
        largest = maximum(largest, load_floats(scores + 4 * i))
    top = lanes_max(largest)
    total = splat_f32(np.float32(0))
    for i in range(0, padded, LANES):
        weight = exponential(subtract(load_floats(scores + 4 * i), splat_f32(top)))
        store_floats(scores + 4 * i, weight)
        total = add(total, weight)
    decay = lanes_max(exponential(splat_f32(load_f32(sums) - top)))
    store_f32(sums, top)
    store_f32(sums + 4, load_f32(sums + 4) * decay + lanes_sum(total))
    store_f32(sums + 8, decay)


@device_function
def add_sixteen(scores, values, page_bytes, first, last, padded, d, sums):
    """Add elements d…d + 15 of the weighted values of keys first…last to those of four queries."""
    out = sums + 64 * ENCODER_QUERIES + 4 * d
    t0 = multiply(load_floats(out), splat_f32(load_f32(sums + 8)))
    t1 = multiply(load_floats(out + 4 * padded), splat_f32(load_f32(sums + 72)))
    t2 = multiply(load_floats(out + 8 * padded), splat_f32(load_f32(sums + 136)))
    t3 = multiply(load_floats(out + 12 * padded), splat_f32(load_f32(sums + 200)))
    for key in range(first, last):
        value = load_floats(values + key // LANES * page_bytes + 4 * (padded * (key % LANES) + d))
        at = scores + 4 * key
        t0 = multiply_add(splat_f32(load_f32(at)), value, t0)
        t1 = multiply_add(splat_f32(load_f32(at + ROW)), value, t1)
        t2 = multiply_add(splat_f32(load_f32(at + 2 * ROW)), value, t2)
        t3 = multiply_add(splat_f32(load_f32(at + 3 * ROW)), value, t3)
    store_floats(out, t0)
    store_floats(out + 4 * padded, t1)
    store_floats(out + 8 * padded, t2)
    store_floats(out + 12 * padded, t3)


@device_function
def add_sixty_four(scores, values, page_bytes, first, last, padded, d, sums):
    """As `add_sixteen`, for elements d…d + 63: for 32 registers of 64 bytes."""
    out = sums + 64 * ENCODER_QUERIES + 4 * d
    t0 = scaled_four(out, load_f32(sums + 8))
    t1 = scaled_four(out + 4 * padded, load_f32(sums + 72))
    t2 = scaled_four(out + 8 * padded, load_f32(sums + 136))
    t3 = scaled_four(out + 12 * padded, load_f32(sums + 200))
    for key in range(first, last):
        row = values + key // LANES * page_bytes + 4 * (padded * (key % LANES) + d)
        value = load_floats(row), load_floats(row + 64), load_floats(row + 128), load_floats(row + 192)
        at = scores + 4 * key
        t0 = add_products(at, value, t0)
        t1 = add_products(at + ROW, value, t1)
        t2 = add_products(at + 2 * ROW, value, t2)
        t3 = add_products(at + 3 * ROW, value, t3)
    store_four(out, t0)
    store_four(out + 4 * padded, t1)
    store_four(out + 8 * padded, t2)
    store_four(out + 12 * padded, t3)


@device_function
def add_values(scores, values, page_bytes, first, last, padded, sums):
    """Add the weighted values of keys first…last of a tile, whose pages begin at `values`, to the sums of
    four queries.
    """
    d = 0
    if has_wide_registers() != 0:
        while d + 64 <= padded:
            add_sixty_four(scores, values, page_bytes, first, last, padded, d, sums)
            d += 64
    while d < padded:
        add_sixteen(scores, values, page_bytes, first, last, padded, d, sums)
        d += LANES
