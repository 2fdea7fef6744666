"""GEMV with memory-mapped rows: sixteen at a time are interleaved in the thread's scratch.

The matrix is never copied as a whole, so the operating system can evict and reload the file's pages. The cost
is one more read and write of every group, in the L1 and L2 cache.
"""

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.native.gemv.interleave import gather_group
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import (
    call_pointer_10,
    load_u8,
    load_u16,
    store_i8,
    store_i16,
    store_i64,
)
from edgeinfer_kernels.cpu.runtime.kernel_args import FileRowsArgs
from edgeinfer_quant_formats.formats import FORMATS

TQ1_0_BYTES, TQ2_0_BYTES = FORMATS["TQ1_0"].block_bytes, FORMATS["TQ2_0"].block_bytes

exports = Exports()


@device_function
def ternary_digit(block, column):
    """Column 0..255 of a TQ1_0 block as 0, 1 or 2."""
    if column < 160:
        byte, power = load_u8(block + column % 32), column // 32
    elif column < 240:
        byte, power = load_u8(block + 32 + (column - 160) % 16), (column - 160) // 16
    else:
        byte, power = load_u8(block + 48 + (column - 240) % 4), (column - 240) // 4
    for _ in range(power):
        byte = byte * 3 % 256
    return byte * 3 // 256


@device_function
def widen_ternary(source, target, blocks):
    """Convert a row of TQ1_0 to TQ2_0, which holds the same values. Reads 54 bytes per block, writes 66."""
    for block in range(blocks):
        at = source + TQ1_0_BYTES * block
        to = target + TQ2_0_BYTES * block
        for byte in range(64):
            column = byte // 32 * 128 + byte % 32
            packed = ternary_digit(at, column) | ternary_digit(at, column + 32) << 2
            packed |= ternary_digit(at, column + 64) << 4 | ternary_digit(at, column + 96) << 6
            store_i8(to + byte, packed)
        store_i16(to + 64, load_u16(at + 52))


@device_function
def fill_group(matrix, first, group):
    """Interleave rows first… of the matrix at `group`; missing rows and columns are zeros."""
    rows = min(ROWS_PER_GROUP, matrix.rows - first)
    row_bytes = matrix.row_bytes
    source = matrix.source + first * row_bytes
    group_bytes = matrix.group_bytes
    blocks = matrix.blocks
    if matrix.ternary != 0:
        wide = matrix.layout_row_bytes
        for row in range(rows):
            widen_ternary(source + row * row_bytes, group + group_bytes + row * wide, blocks)
        source = group + group_bytes
        row_bytes = wide
    if rows * row_bytes != group_bytes:
        for at in range(group, group + group_bytes, 8):
            store_i64(at, 0)
    gather_group(
        source,
        row_bytes,
        group,
        rows,
        blocks,
        matrix.block_bytes,
        matrix.fields,
        matrix.field_count,
    )


@exports.add("rows_in_file", FileRowsArgs, *9 * (int,))
def rows_in_file(
    matrix, columns, first_row, last_row, activations, stride, tokens, output, output_stride, scratch
):
    """A GEMV kernel (see ROW_ARGUMENTS) whose weights are memory-mapped. With several tokens two groups are
    multiplied together, because they share the loads of activations.
    """
    group = scratch + matrix.group_offset
    step = ROWS_PER_GROUP if tokens == 1 or matrix.ternary != 0 else 2 * ROWS_PER_GROUP
    for first in range(first_row, last_row, step):
        rows = min(step, last_row - first)
        fill_group(matrix, first, group)
        if rows > ROWS_PER_GROUP:
            fill_group(matrix, first + ROWS_PER_GROUP, group + matrix.group_bytes)
        call_pointer_10(
            matrix.kernel,
            group,
            columns,
            0,
            rows,
            activations,
            stride,
            tokens,
            output + 4 * first,
            output_stride,
            scratch,
        )
