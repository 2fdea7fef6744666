"""Attention over a cache in bytes: as `softmax.py`, with the float16 that SCALED elements of a head share.

A page of sixteen positions has its scales side by side, group of elements by group. Keys' scales multiply
sums over a group, values' the weights of their positions, so that bytes are widened in registers only and
memory is read once.
"""

from edgeinfer_kernels.cpu.native.attention_states import DECAY, STATE_BYTES
from edgeinfer_kernels.cpu.native.byte_lanes import load_signed_bytes, to_float
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.float_lanes import (
    load_floats,
    load_halves,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.four_vectors import (
    add_products,
    four_zeros,
    make_load_four,
    make_prefetch,
    scaled_four,
    store_capped,
    store_four,
)
from edgeinfer_kernels.cpu.native.scalars import load_f32, prefetch
from edgeinfer_kernels.cpu.structures import CACHE_LINE, POSITIONS_A_TILE, SCALED, SCORES_BYTES

LANES = 16
PAGES_A_TILE = POSITIONS_A_TILE // LANES
GROUP_SCALES = 2 * LANES
"""Bytes of a page's scales of one group."""


@inner
def load_codes(at):
    """Sixteen bytes as float32, without their scale."""
    return to_float(load_signed_bytes(at))


load_four_codes = make_load_four(load_codes)
load_four_scales = make_load_four(load_halves)
load_four_floats = make_load_four(load_floats)
prefetch_row = make_prefetch(4 * LANES)


@inner
def scale_page(padded):
    """Bytes of a page's scales."""
    return GROUP_SCALES * ((padded + SCALED - 1) // SCALED)


@inner
def prefetch_scales(scales, padded):
    """Ask for the scales of the next tile."""
    nbytes = PAGES_A_TILE * scale_page(padded)
    for line in range(0, nbytes, CACHE_LINE):
        prefetch(scales + nbytes + line)


@inner
def add_group(scores, sums, scales, pitch):
    """scores += scale · sum, for 64 positions."""
    s = load_four_scales(scales, pitch)
    store_floats(scores, multiply_add(s[0], sums[0], load_floats(scores)))
    store_floats(scores + 64, multiply_add(s[1], sums[1], load_floats(scores + 64)))
    store_floats(scores + 128, multiply_add(s[2], sums[2], load_floats(scores + 128)))
    store_floats(scores + 192, multiply_add(s[3], sums[3], load_floats(scores + 192)))


@inner
def cap(scores, scale, soft_cap):
    store_capped(scores, load_four_floats(scores, 64), scale, soft_cap)


@inner
def score_one(query, keys, scales, ahead, head_dim, padded, scale, soft_cap, scores):
    prefetch_scales(scales, padded)
    store_four(scores, four_zeros())
    for begin in range(0, head_dim, SCALED):
        total = four_zeros()
        for d in range(begin, min(head_dim, begin + SCALED)):
            prefetch_row(keys, d, ahead)
            total = add_products(query + 4 * d, load_four_codes(keys + LANES * d, LANES * padded), total)
        add_group(scores, total, scales + GROUP_SCALES * (begin // SCALED), scale_page(padded))
    cap(scores, scale, soft_cap)


@inner
def score_four(query, keys, scales, ahead, head_dim, padded, scale, soft_cap, scores):
    prefetch_scales(scales, padded)
    for head in range(4):
        store_four(scores + SCORES_BYTES * head, four_zeros())
    for begin in range(0, head_dim, SCALED):
        t0 = four_zeros()
        t1 = four_zeros()
        t2 = four_zeros()
        t3 = four_zeros()
        for d in range(begin, min(head_dim, begin + SCALED)):
            prefetch_row(keys, d, ahead)
            key = load_four_codes(keys + LANES * d, LANES * padded)
            q = query + 4 * d
            t0 = add_products(q, key, t0)
            t1 = add_products(q + 4 * padded, key, t1)
            t2 = add_products(q + 8 * padded, key, t2)
            t3 = add_products(q + 12 * padded, key, t3)
        at, pitch = scales + GROUP_SCALES * (begin // SCALED), scale_page(padded)
        add_group(scores, t0, at, pitch)
        add_group(scores + SCORES_BYTES, t1, at, pitch)
        add_group(scores + 2 * SCORES_BYTES, t2, at, pitch)
        add_group(scores + 3 * SCORES_BYTES, t3, at, pitch)
    for head in range(4):
        cap(scores + SCORES_BYTES * head, scale, soft_cap)


score_byte_tiles = score_one, score_four


@inner
def scale_weights(weights, scales, pitch, out):
    """out = weight · scale of a group of elements, for 64 positions."""
    s = load_four_scales(scales, pitch)
    store_floats(out, multiply(s[0], load_floats(weights)))
    store_floats(out + 64, multiply(s[1], load_floats(weights + 64)))
    store_floats(out + 128, multiply(s[2], load_floats(weights + 128)))
    store_floats(out + 192, multiply(s[3], load_floats(weights + 192)))


@inner
def scale_two_groups(weights, scales, padded, out):
    """`scale_weights` for two groups, SCORES_BYTES apart."""
    scale_weights(weights, scales, scale_page(padded), out)
    scale_weights(weights, scales + GROUP_SCALES, scale_page(padded), out + SCORES_BYTES)


@inner
def add_two_groups(factors, x, total):
    """total + factor·x; the first half of x has one factor, the second another."""
    low, high = splat_f32(load_f32(factors)), splat_f32(load_f32(factors + SCORES_BYTES))
    return (
        multiply_add(low, x[0], total[0]),
        multiply_add(low, x[1], total[1]),
        multiply_add(high, x[2], total[2]),
        multiply_add(high, x[3], total[3]),
    )


@inner
def add_one(weights, values, scales, spare, ahead, first, last, padded, state):
    prefetch_scales(scales, padded)
    decay = load_f32(state + DECAY)
    mixed = state + STATE_BYTES
    whole = padded // 64 * 64
    for d in range(0, whole, 64):
        scale_two_groups(weights, scales + GROUP_SCALES * (d // SCALED), padded, spare)
        total = scaled_four(mixed + 4 * d, decay)
        for i in range(first, last):
            at = values + padded * i + d
            prefetch_row(at, 0, ahead)
            total = add_two_groups(spare + 4 * i, load_four_codes(at, LANES), total)
        store_four(mixed + 4 * d, total)
    for d in range(whole, padded, LANES):
        scale_weights(weights, scales + GROUP_SCALES * (d // SCALED), scale_page(padded), spare)
        m = multiply(load_floats(mixed + 4 * d), splat_f32(decay))
        for i in range(first, last):
            m = multiply_add(splat_f32(load_f32(spare + 4 * i)), load_codes(values + padded * i + d), m)
        store_floats(mixed + 4 * d, m)


@inner
def add_four(weights, values, scales, spare, ahead, first, last, padded, state):
    """For padded head dimensions that are whole multiples of 64."""
    prefetch_scales(scales, padded)
    step = STATE_BYTES + 4 * padded
    for d in range(0, padded, 64):
        for head in range(4):
            at = scales + GROUP_SCALES * (d // SCALED)
            scale_two_groups(weights + SCORES_BYTES * head, at, padded, spare + 2 * SCORES_BYTES * head)
        mixed = state + STATE_BYTES + 4 * d
        t0 = scaled_four(mixed, load_f32(state + DECAY))
        t1 = scaled_four(mixed + step, load_f32(state + step + DECAY))
        t2 = scaled_four(mixed + 2 * step, load_f32(state + 2 * step + DECAY))
        t3 = scaled_four(mixed + 3 * step, load_f32(state + 3 * step + DECAY))
        for i in range(first, last):
            at = values + padded * i + d
            prefetch_row(at, 0, ahead)
            value = load_four_codes(at, LANES)
            w = spare + 4 * i
            t0 = add_two_groups(w, value, t0)
            t1 = add_two_groups(w + 2 * SCORES_BYTES, value, t1)
            t2 = add_two_groups(w + 4 * SCORES_BYTES, value, t2)
            t3 = add_two_groups(w + 6 * SCORES_BYTES, value, t3)
        store_four(mixed, t0)
        store_four(mixed + step, t1)
        store_four(mixed + 2 * step, t2)
        store_four(mixed + 3 * step, t3)


add_byte_values = add_one, add_four
