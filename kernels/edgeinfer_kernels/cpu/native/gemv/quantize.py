"""Activations in the input formats of matrices: int8 blocks of 32 with scale and sums, or bfloat16 tiles."""

import numpy as np

from edgeinfer_kernels.cpu.native.amx.tiles import store_bfloats
from edgeinfer_kernels.cpu.native.simd.byte_lanes import store_as_bytes, store_scale_and_sums
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import load_floats, multiply, nearest_int, splat_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import largest_magnitude
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_BYTES, CACHE_LINE, TILE_BYTES


@device_function
def quantize_blocks(x, out, first, last):
    """Columns first..last of a row: q = round(x·127/max|x|), scale = max|x|/127 per 32. A NaN makes the scale
    NaN, so invalid values are not hidden by rounding.

    Reads 4 bytes per column, writes 2.
    """
    for block in range(first // 32, last // 32):
        values = x + 128 * block
        largest = largest_magnitude(values, 32)
        inverse = np.float32(0)
        if largest > np.float32(0):
            inverse = np.float32(127) / largest
        multiplier = splat_f32(inverse)
        low = nearest_int(multiply(load_floats(values), multiplier))
        high = nearest_int(multiply(load_floats(values + 64), multiplier))
        scale = largest * np.float32(1 / 127)
        to = out + ACTIVATION_BYTES * block
        store_as_bytes(to, low)
        store_as_bytes(to + 16, high)
        store_scale_and_sums(to, low, high, scale)


@device_function
def write_tiles(x, tiles, columns, token, first, last):
    """Columns first..last of a token's row of `columns` as bfloat16, in tiles of 16 tokens by 32 columns.

    Reads 4 bytes per column, writes 2.
    """
    steps = columns // 32
    at = tiles + token // 16 * steps * TILE_BYTES + token % 16 * CACHE_LINE
    for step in range(first // 32, last // 32):
        store_bfloats(at + TILE_BYTES * step, load_floats(x + 128 * step))
        store_bfloats(at + TILE_BYTES * step + 32, load_floats(x + 128 * step + 64))


@device_function
def write_activations_from(x, target, start, token, tokens, first, last):
    """Write columns first..last of a token's row to `target`, in the format for `tokens` tokens
    whose first row is `start`.
    """
    quantized = target.quantized
    if quantized == 0:
        return
    stride = target.quantized_stride
    quantized += start * stride
    if tokens >= target.tile_tokens:
        write_tiles(x, quantized, target.columns, token, first, last)
    else:
        quantize_blocks(x, quantized + token * stride, first, last)


@device_function
def write_activations(x, target, token, tokens, first, last):
    """As `write_activations_from` for tokens from row 0 on."""
    write_activations_from(x, target, 0, token, tokens, first, last)
