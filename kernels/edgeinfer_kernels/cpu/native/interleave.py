"""Moving the rows of a matrix into the interleaved layout of `layout.py`."""

from edgeinfer_kernels.cpu.layout import ROWS_A_GROUP
from edgeinfer_kernels.cpu.native.exports import Exports
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


@exports.add("interleave_rows", 7)
def interleave_rows(source, target, rows, blocks, block_bytes, fields, field_count):
    """Rows of `blocks` blocks to groups of sixteen; `fields`: (offset, unit, count) as int64, `field_count`
    of them.

    `target` is zero beforehand and has room for whole groups. Reads and writes rows·blocks·block_bytes.
    """
    for row in range(rows):
        group = target + row // ROWS_A_GROUP * blocks * block_bytes * ROWS_A_GROUP
        lane = row % ROWS_A_GROUP
        for block in range(blocks):
            from_block = source + (row * blocks + block) * block_bytes
            to_block = group + block * block_bytes * ROWS_A_GROUP
            for field in range(field_count):
                offset = load_i64(fields + 24 * field)
                unit = load_i64(fields + 24 * field + 8)
                place = to_block + ROWS_A_GROUP * offset + lane * unit
                for index in range(load_i64(fields + 24 * field + 16)):
                    at = from_block + offset + index * unit
                    to = place + index * unit * ROWS_A_GROUP
                    if unit == 4:
                        store_i32(to, load_i32(at))
                    elif unit == 2:
                        store_i16(to, load_u16(at))
                    else:
                        store_i8(to, load_u8(at))
