"""Extends `softmax_tiles.py` for an 8-bit cache: SCALED elements of a head share a float16 scale.

The scales of a page of sixteen positions are contiguous, group by group. The scales of keys multiply sums
over a group; those of values multiply the weights of their positions. So bytes are converted only in
registers, and memory is read once.
"""

from edgeinfer_kernels.cpu.native.simd.byte_lanes import load_signed_bytes, to_float
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_f16,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.four_vectors import four_zeros, make_load_four, store_four
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, prefetch
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, POSITIONS_PER_TILE, SCALED, SCORES_BYTES

LANES = 16
PAGES_PER_TILE = POSITIONS_PER_TILE // LANES
GROUP_SCALES = 2 * LANES
"""Bytes of a page's scales for one group."""


@device_function
def load_codes(at):
    """Sixteen bytes as float32, without their scale."""
    return to_float(load_signed_bytes(at))


load_four_scales = make_load_four(load_f16)


@device_function
def scale_page(padded):
    """Bytes of a page's scales."""
    return GROUP_SCALES * ((padded + SCALED - 1) // SCALED)


@device_function
def prefetch_scales(scales, padded):
    """Prefetch the scales of the next tile."""
    nbytes = PAGES_PER_TILE * scale_page(padded)
    for line in range(0, nbytes, CACHE_LINE):
        prefetch(scales + nbytes + line)


@device_function
def add_scaled_sums(scores, sums, scales, begin, padded):
    """scores += scale · sum for 64 positions, starting from 0; the `put` function of `make_score_tiles`."""
    if begin == 0:
        prefetch_scales(scales, padded)
        store_four(scores, four_zeros())
    s = load_four_scales(scales + GROUP_SCALES * (begin // SCALED), scale_page(padded))
    store_floats(scores, multiply_add(s[0], sums[0], load_floats(scores)))
    store_floats(scores + 64, multiply_add(s[1], sums[1], load_floats(scores + 64)))
    store_floats(scores + 128, multiply_add(s[2], sums[2], load_floats(scores + 128)))
    store_floats(scores + 192, multiply_add(s[3], sums[3], load_floats(scores + 192)))


@device_function
def scale_group(weights, scales, pitch, out):
    """out = weight · scale of a group of elements, for 64 positions."""
    s = load_four_scales(scales, pitch)
    store_floats(out, multiply(s[0], load_floats(weights)))
    store_floats(out + 64, multiply(s[1], load_floats(weights + 64)))
    store_floats(out + 128, multiply(s[2], load_floats(weights + 128)))
    store_floats(out + 192, multiply(s[3], load_floats(weights + 192)))


@device_function
def scaled_weights(weights, scales, padded, d, heads, spare):
    """Factors of the elements from `d` on: those of their group and, SCORES_BYTES later, of the next group if
    there is one; the `factors_of` function of `make_add_values`.
    """
    if d == 0:
        prefetch_scales(scales, padded)
    at, pitch = scales + GROUP_SCALES * (d // SCALED), scale_page(padded)
    for head in range(heads):
        own, out = weights + SCORES_BYTES * head, spare + 2 * SCORES_BYTES * head
        scale_group(own, at, pitch, out)
        if d + SCALED < padded:
            scale_group(own, at + GROUP_SCALES, pitch, out + SCORES_BYTES)
    return spare


@device_function
def add_two_groups(factors, x, total):
    """total + factor·x; each half of x has a separate factor."""
    low, high = splat_f32(load_f32(factors)), splat_f32(load_f32(factors + SCORES_BYTES))
    return (
        multiply_add(low, x[0], total[0]),
        multiply_add(low, x[1], total[1]),
        multiply_add(high, x[2], total[2]),
        multiply_add(high, x[3], total[3]),
    )
