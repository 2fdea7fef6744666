"""Moving the rows of a matrix into the interleaved layout of `layout.py`."""

from edgeinfer_kernels.cpu.layout import ROWS_A_GROUP
from edgeinfer_kernels.cpu.native.exports import Exports, inner
from edgeinfer_kernels.cpu.native.scalars import (
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_i8,
    store_i16,
    store_i32,
)

exports = Exports()


@inner
def gather_units(source, row_bytes, target, unit, rows):
    """Unit after unit of up to sixteen rows, side by side."""
    for lane in range(rows):
        at = source + lane * row_bytes
        if unit == 4:
            store_i32(target + 4 * lane, load_i32(at))
        elif unit == 2:
            store_i16(target + 2 * lane, load_u16(at))
        else:
            store_i8(target + lane, load_u8(at))


@inner
def gather_block(source, row_bytes, target, fields, field_count, rows):
    """One block of up to sixteen rows."""
    for field in range(field_count):
        offset = load_i64(fields + 24 * field)
        unit = load_i64(fields + 24 * field + 8)
        for index in range(load_i64(fields + 24 * field + 16)):
            at = source + offset + index * unit
            to = target + ROWS_A_GROUP * (offset + index * unit)
            if rows == ROWS_A_GROUP and unit == 4:
                gather_units(at, row_bytes, to, 4, ROWS_A_GROUP)
            elif rows == ROWS_A_GROUP and unit == 2:
                gather_units(at, row_bytes, to, 2, ROWS_A_GROUP)
            else:
                gather_units(at, row_bytes, to, unit, rows)


@exports.add("interleave_rows", 7)
def interleave_rows(source, target, rows, blocks, block_bytes, fields, field_count):
    """Rows of `blocks` blocks to groups of sixteen; `fields` are (offset, unit, count) in int64.

    `target` is zero beforehand and has room for whole groups. Reads and writes rows·blocks·block_bytes.
    """
    row_bytes = blocks * block_bytes
    for first in range(0, rows, ROWS_A_GROUP):
        count = min(ROWS_A_GROUP, rows - first)
        for block in range(blocks):
            at = source + first * row_bytes + block * block_bytes
            to = target + first * row_bytes + block * block_bytes * ROWS_A_GROUP
            gather_block(at, row_bytes, to, fields, field_count, count)
