"""Activations to int8: blocks of 32 with one float32 scale, and the sums that offsets and minima need."""

import numpy as np

from edgeinfer_kernels.cpu.native.byte_lanes import lanes_sum_i32, store_as_bytes
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.float_lanes import load_floats, multiply, nearest_int, splat_f32
from edgeinfer_kernels.cpu.native.scalars import store_f32, store_i32
from edgeinfer_kernels.cpu.native.vector_math import largest_magnitude


@inner
def quantise_blocks(x, out, columns, first, last):
    """Columns first..last of a row of `columns`: q = round(x·127/max|x|), scale = max|x|/127 per 32.

    Reads 4 bytes a column, writes 1.375.
    """
    scales = out + columns
    sums = scales + columns // 8
    for block in range(first // 32, last // 32):
        values = x + 128 * block
        largest = largest_magnitude(values, 32)
        inverse = np.float32(0)
        if largest > np.float32(0):
            inverse = np.float32(127) / largest
        multiplier = splat_f32(inverse)
        low = nearest_int(multiply(load_floats(values), multiplier))
        high = nearest_int(multiply(load_floats(values + 64), multiplier))
        store_as_bytes(out + 32 * block, low)
        store_as_bytes(out + 32 * block + 16, high)
        store_f32(scales + 4 * block, largest * np.float32(1 / 127))
        store_i32(sums + 8 * block, lanes_sum_i32(low))
        store_i32(sums + 8 * block + 4, lanes_sum_i32(high))
