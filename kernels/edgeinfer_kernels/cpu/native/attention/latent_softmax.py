"""Extends `softmax.py` for a latent cache, whose rows are keys and, with fewer elements, values too.

A score is a dot product with a row, so it needs a sum across lanes. This costs less than a second copy of the
cache in tiles, whose bytes every token would read.
"""

from edgeinfer_kernels.cpu.native.attention.softmax import (
    CacheElements,
    load_fp8,
    make_gather,
    rows_of_bytes,
)
from edgeinfer_kernels.cpu.native.attention.softmax_q4_0 import (
    GROUP_BYTES,
    high_nibble_as_float,
    low_nibble_as_float,
    rows_of_nibbles,
)
from edgeinfer_kernels.cpu.native.attention.softmax_q8_0 import (
    GROUP_SCALES,
    add_two_groups,
    load_codes,
    load_four_scales,
    scale_page,
    scaled_weights,
)
from edgeinfer_kernels.cpu.native.attention.softmax_tiles import (
    make_add_values,
    make_row_loads,
    weights_alone,
)
from edgeinfer_kernels.cpu.native.simd.byte_lanes import load_unsigned_bytes
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    lanes_sum,
    load_f16,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
)
from edgeinfer_kernels.cpu.native.simd.four_vectors import (
    add_products,
    cap_scores,
    four_zeros,
    store_four,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.runtime.abi import SCALED, SCORES_BYTES


@device_function
def no_factors(scales, padded, spare):
    """For elements without scales."""
    return spare


@device_function
def widened_scales(scales, padded, spare):
    """The scales of a tile as float32 at `spare`: sixty-four positions of each group in turn."""
    pitch = scale_page(padded)
    for group in range((padded + SCALED - 1) // SCALED):
        store_four(spare + SCORES_BYTES * group, load_four_scales(scales + GROUP_SCALES * group, pitch))
    return spare


@device_function
def add_pair(query, x, factor, total):
    """total + query·x for thirty-two elements."""
    return multiply_add(load_floats(query + 64), x[1], multiply_add(load_floats(query), x[0], total))


@device_function
def add_single(query, x, factor, total):
    """total + query·x for sixteen elements."""
    return multiply_add(load_floats(query), x, total)


@device_function
def add_scaled_pair(query, x, factor, total):
    """As `add_pair`, with the factor of the elements at an address."""
    both = multiply_add(load_floats(query + 64), x[1], multiply(load_floats(query), x[0]))
    return multiply_add(both, splat_f32(load_f32(factor)), total)


@device_function
def add_scaled_single(query, x, factor, total):
    """As `add_single`, with the factor of the elements at an address."""
    return multiply_add(multiply(load_floats(query), x), splat_f32(load_f32(factor)), total)


def make_row_scores(row_bytes, load_pair, load_one, factors_of, add_two, add_one):
    """As `make_score_tiles`, for keys in rows.

    `load_pair(row, d)` returns thirty-two elements from `d` on, `load_one(row, d)` sixteen; `add_two` and
    `add_one` add their products with a query. `factors_of(scales, padded, spare)` returns the address of the
    factors of 64 positions, SCALED elements after SCALED elements.
    """

    @device_function
    def dot_four(query, row, factors, padded):
        """Sixteen partial sums for each of four heads."""
        step = 4 * padded
        t0, t1, t2, t3 = four_zeros()
        for d in range(0, padded // SCALED * SCALED, SCALED):
            x = load_pair(row, d)
            q, factor = query + 4 * d, factors + SCORES_BYTES * (d // SCALED)
            t0 = add_two(q, x, factor, t0)
            t1 = add_two(q + step, x, factor, t1)
            t2 = add_two(q + 2 * step, x, factor, t2)
            t3 = add_two(q + 3 * step, x, factor, t3)
        if padded % SCALED != 0:
            d = padded // SCALED * SCALED
            y = load_one(row, d)
            q, factor = query + 4 * d, factors + SCORES_BYTES * (d // SCALED)
            t0 = add_one(q, y, factor, t0)
            t1 = add_one(q + step, y, factor, t1)
            t2 = add_one(q + 2 * step, y, factor, t2)
            t3 = add_one(q + 3 * step, y, factor, t3)
        return t0, t1, t2, t3

    @device_function
    def score_four(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, last, scores):
        factors = factors_of(scales, padded, spare)
        for i in range(last):
            sums = dot_four(query, keys + row_bytes(padded) * i, factors + 4 * i, padded)
            store_f32(scores + 4 * i, lanes_sum(sums[0]))
            store_f32(scores + SCORES_BYTES + 4 * i, lanes_sum(sums[1]))
            store_f32(scores + 2 * SCORES_BYTES + 4 * i, lanes_sum(sums[2]))
            store_f32(scores + 3 * SCORES_BYTES + 4 * i, lanes_sum(sums[3]))
        for head in range(4):
            cap_scores(scores + head * SCORES_BYTES, scale, soft_cap, last)

    @device_function
    def score_one(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, last, scores):
        factors = factors_of(scales, padded, spare)
        for i in range(last):
            row = keys + row_bytes(padded) * i
            total = four_zeros()[0]
            for d in range(0, padded // SCALED * SCALED, SCALED):
                factor = factors + SCORES_BYTES * (d // SCALED) + 4 * i
                total = add_two(query + 4 * d, load_pair(row, d), factor, total)
            if padded % SCALED != 0:
                d = padded // SCALED * SCALED
                factor = factors + SCORES_BYTES * (d // SCALED) + 4 * i
                total = add_one(query + 4 * d, load_one(row, d), factor, total)
            store_f32(scores + 4 * i, lanes_sum(total))
        cap_scores(scores, scale, soft_cap, last)

    return score_one, score_four


def make_load_pair(load_one):
    """Thirty-two elements of a row from `d` on."""

    @device_function
    def load_pair(row, d):
        return load_one(row, d), load_one(row, d + 16)

    return load_pair


def make_plain_latents(load_cached, element_bytes):
    """For a cache whose elements have no scales."""
    rows = make_row_loads(load_cached, element_bytes)
    load_pair = make_load_pair(rows[2])
    scores_of = make_row_scores(rows[0], load_pair, rows[2], no_factors, add_pair, add_single)
    values_of = make_add_values(rows, weights_alone, add_products, SCORES_BYTES)
    return CacheElements(rows[0], rows[0], scores_of, values_of)


def make_scaled_latents(rows, load_pair):
    """For a cache whose elements have scales."""
    scores_of = make_row_scores(
        rows[0], load_pair, rows[2], widened_scales, add_scaled_pair, add_scaled_single
    )
    values_of = make_add_values(rows, scaled_weights, add_two_groups, 2 * SCORES_BYTES)
    return CacheElements(rows[0], rows[0], scores_of, values_of)


@device_function
def load_nibble_pair(row, d):
    """A group of SCALED elements from `d` on."""
    codes = load_unsigned_bytes(row + d // SCALED * GROUP_BYTES)
    return low_nibble_as_float(codes), high_nibble_as_float(codes)


@device_function
def load_code_pair(row, d):
    """A group of SCALED elements from `d` on."""
    return load_codes(row + d), load_codes(row + d + 16)


gather_latents = make_gather(
    (
        make_plain_latents(load_floats, 4),
        make_plain_latents(load_f16, 2),
        make_scaled_latents(rows_of_bytes, load_code_pair),
        make_scaled_latents(rows_of_nibbles, load_nibble_pair),
        make_plain_latents(load_fp8, 1),
    )
)
