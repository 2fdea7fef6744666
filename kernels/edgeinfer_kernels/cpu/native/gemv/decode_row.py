"""Dequantizes one row of a matrix in file layout to float32: the embedding of a token."""

from collections.abc import Callable

import numpy as np

from edgeinfer_kernels.cpu.native.gemv.interleave import gather_block
from edgeinfer_kernels.cpu.native.gemv.rows import RowFormat
from edgeinfer_kernels.cpu.native.simd.byte_lanes import first_word
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import first_lane
from edgeinfer_kernels.cpu.native.simd.scalars import store_f32
from edgeinfer_kernels.cpu.runtime.kernel_args import FieldArgs


def make_decode_row(row_format: RowFormat) -> Callable[..., None]:
    """The kernel (source, columns, fields, field_count, scratch, output), all int64, for rows of this format.

    weight = scale·(quant - offset) - minimum, in the order of the codecs, so the results are bit-identical.
    Each block is stored as the first of sixteen interleaved rows in `scratch`, sixteen blocks wide, and
    dequantized with the `unpack` of the GEMV kernels. `fields` are those of `interleave_rows`; `output` is
    float32 (columns,). Reads the row's bytes, writes columns·4.
    """
    unpack, sub_blocks, block_bytes = row_format.unpack, row_format.sub_blocks, row_format.block_bytes
    offset, signed = np.float32(row_format.offset), row_format.signed
    last_scale = 7 + row_format.scales
    first_minimum, last_minimum = last_scale + 1, last_scale + row_format.scales

    @device_function
    def store_four(quants, scale, minimum, output):
        word = first_word(quants)
        for column in range(4):
            quant = word >> 8 * column & 255
            if signed and quant > 127:
                quant -= 256
            store_f32(output + 4 * column, scale * (np.float32(quant) - offset) - minimum)

    @device_function
    def no_minima(u):
        return np.float32(0), np.float32(0)

    @device_function
    def stored_minima(u):
        return first_lane(u[first_minimum]), first_lane(u[last_minimum])

    minima = stored_minima if row_format.minima else no_minima

    @device_function
    def store_columns(u, output):
        first, last = first_lane(u[8]), first_lane(u[last_scale])
        below_first, below_last = minima(u)
        store_four(u[0], first, below_first, output)
        store_four(u[1], first, below_first, output + 16)
        store_four(u[2], first, below_first, output + 32)
        store_four(u[3], first, below_first, output + 48)
        store_four(u[4], last, below_last, output + 64)
        store_four(u[5], last, below_last, output + 80)
        store_four(u[6], last, below_last, output + 96)
        store_four(u[7], last, below_last, output + 112)

    def decode_row(source, columns, fields, field_count, scratch, output):
        for block in range(columns // (32 * sub_blocks)):
            gather_block(source + block * block_bytes, 0, scratch, FieldArgs(fields), field_count, 1)
            for index in range(sub_blocks):
                store_columns(unpack(scratch, index), output + 128 * (block * sub_blocks + index))

    return decode_row
