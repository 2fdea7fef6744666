"""Converts the rows of a matrix to the interleaved layout of `cpu/layout/fields.py`."""

from llvmlite import ir
from numba import types

from edgeinfer_kernels.cpu.layout.fields import PACKED_CODES, ROWS_PER_GROUP
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.lanes import (
    I8,
    I16,
    I32,
    I64,
    address,
    constant_lanes,
    join,
    load,
    operation,
    splat,
    store,
)
from edgeinfer_kernels.cpu.native.simd.scalars import (
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_i8,
    store_i16,
    store_i32,
    store_i64,
    trailing_zeros,
)
from edgeinfer_kernels.cpu.runtime.kernel_args import FieldArgs, ScaleArgs

exports = Exports()


@operation(types.void, (address, types.int64, address))
def gather_four_words(builder, at, row_bytes, target):
    """Four words of each of sixteen rows: a register transposition of 4·4 blocks of four words."""
    rows = []
    for _ in range(ROWS_PER_GROUP):
        rows.append(load(builder, at, ir.VectorType(I32, 4)))
        at = builder.add(at, row_bytes)
    quarters = [join(builder, rows[first : first + 4]) for first in range(0, ROWS_PER_GROUP, 4)]
    for word in range(4):
        picks = [lane + word for lane in range(0, 2 * ROWS_PER_GROUP, 4)]
        mask = ir.Constant(ir.VectorType(I32, len(picks)), picks)
        halves = [builder.shuffle_vector(quarters[i], quarters[i + 1], mask) for i in (0, 2)]
        store(builder, join(builder, halves), target)
        target = builder.add(target, ir.Constant(target.type, 4 * ROWS_PER_GROUP))


@operation(types.void, (address, types.int64, address))
def gather_shorts(builder, at, row_bytes, target):
    """Two bytes of each of sixteen rows."""
    lanes = ir.Constant(ir.VectorType(I16, ROWS_PER_GROUP), ir.Undefined)
    for lane in range(ROWS_PER_GROUP):
        lanes = builder.insert_element(lanes, load(builder, at, I16), ir.Constant(I32, lane))
        at = builder.add(at, row_bytes)
    store(builder, lanes, target)


@device_function
def gather_words(source, row_bytes, target, count):
    """Copy `count` words of sixteen rows, four at a time, the remainder one by one."""
    fours = count // 4 * 4
    for index in range(0, fours, 4):
        gather_four_words(source + 4 * index, row_bytes, target + 4 * ROWS_PER_GROUP * index)
    for index in range(fours, count):
        gather_units(source + 4 * index, row_bytes, target + 4 * ROWS_PER_GROUP * index, 4, ROWS_PER_GROUP)


@device_function
def gather_units(source, row_bytes, target, unit, rows):
    """All units of up to sixteen rows, adjacent."""
    for lane in range(rows):
        at = source + lane * row_bytes
        if unit == 4:
            store_i32(target + 4 * lane, load_i32(at))
        elif unit == 2:
            store_i16(target + 2 * lane, load_u16(at))
        else:
            store_i8(target + lane, load_u8(at))


@operation(types.void, (address,))
def pack_six_bits(builder, at):
    """Pack Q6_K's codes again: six vectors of 64 bytes, 512 bytes apart.

    Before: two vectors of low nibbles for each half of 128 columns, then one of high bits for each half.
    Afterwards each half has three: of its first, second and third quarter. The top two bits of their bytes
    are the fourth quarter, the lowest bits in the first vector.
    """
    codes = ir.VectorType(I8, 64)
    places = [builder.add(at, ir.Constant(I64, 512 * index)) for index in range(6)]
    x0, y0, x1, y1, h0, h1 = (load(builder, place, codes) for place in places)

    def bits(value, mask, shift):
        kept = builder.and_(value, constant_lanes(I8, 64, mask))
        move = builder.shl if shift >= 0 else builder.lshr
        return move(kept, constant_lanes(I8, 64, abs(shift)))

    packed = []
    for x, y, high in ((x0, y0, h0), (x1, y1, h1)):
        packed += [
            (bits(x, 15, 0), bits(high, 3, 4), bits(y, 48, 2)),
            (bits(y, 15, 0), bits(high, 12, 2), bits(y, 192, 0)),
            (bits(x, 240, -4), bits(high, 48, 0), bits(high, 192, 0)),
        ]
    for place, (first, second, third) in zip(places, packed, strict=True):
        store(builder, builder.or_(builder.or_(first, second), third), place)


@device_function
def gather_block(source, row_bytes, target, fields, field_count, rows):
    """One block of up to sixteen rows."""
    for field in range(field_count):
        offset, unit, count = fields[field].offset, fields[field].unit, fields[field].count
        at = source + offset
        to = target + ROWS_PER_GROUP * offset
        if unit == PACKED_CODES:
            for vector in range(count):
                pack_six_bits(to + 64 * vector)
            continue
        if rows == ROWS_PER_GROUP and unit == 4:
            gather_words(at, row_bytes, to, count)
            continue
        if rows == ROWS_PER_GROUP and unit == 2:
            for index in range(count):
                gather_shorts(at + 2 * index, row_bytes, to + 2 * ROWS_PER_GROUP * index)
            continue
        for index in range(count):
            gather_units(at + index * unit, row_bytes, to + ROWS_PER_GROUP * index * unit, unit, rows)


@device_function
def gather_group(source, row_bytes, target, rows, blocks, block_bytes, fields, field_count):
    """A group of up to sixteen rows."""
    for block in range(blocks):
        at = source + block * block_bytes
        to = target + ROWS_PER_GROUP * block * block_bytes
        gather_block(at, row_bytes, to, fields, field_count, rows)


def _non_finite_lanes(element):
    """An intrinsic: bit i is set if all bits of `exponent` are set in number i of the sixteen at `at`."""

    def non_finite_lanes(builder, at, exponent):
        mask = splat(builder, builder.trunc(exponent, element), ROWS_PER_GROUP)
        numbers = load(builder, at, ir.VectorType(element, ROWS_PER_GROUP))
        is_non_finite = builder.icmp_unsigned("==", builder.and_(numbers, mask), mask)
        return builder.zext(builder.bitcast(is_non_finite, I16), I64)

    return operation(types.int64, (address, types.int64))(non_finite_lanes)


non_finite_bytes, non_finite_shorts, non_finite_words = map(_non_finite_lanes, (I8, I16, I32))


@device_function
def non_finite_rows(group, blocks, block_bytes, scales):
    """Bit i is set if row i of an interleaved group has a scale that is NaN or infinite."""
    offset, unit = scales.offset, scales.unit
    count, exponent = scales.count, scales.exponent
    bits = 0
    for block in range(blocks):
        at = group + ROWS_PER_GROUP * (block * block_bytes + offset)
        for index in range(count):
            numbers = at + ROWS_PER_GROUP * unit * index
            if unit == 2:
                bits |= non_finite_shorts(numbers, exponent)
            elif unit == 4:
                bits |= non_finite_words(numbers, exponent)
            else:
                bits |= non_finite_bytes(numbers, exponent)
    return bits


@exports.add("interleave_rows", *5 * (int,), FieldArgs, int, ScaleArgs, int)
def interleave_rows(source, target, rows, blocks, block_bytes, fields, field_count, scales, broken):
    """Convert rows of `blocks` blocks to groups of sixteen.

    `target` must be zeroed and large enough for whole groups. Reads and writes rows·blocks·block_bytes.
    `scales`: at address 0, or checked by `non_finite_rows` for each group while it is in the L1 cache.
    The first row with an invalid scale is written to the int64 at `broken`, which must be -1 before.
    """
    row_bytes = blocks * block_bytes
    for first in range(0, rows, ROWS_PER_GROUP):
        count = min(ROWS_PER_GROUP, rows - first)
        at = source + first * row_bytes
        group = target + first * row_bytes
        gather_group(at, row_bytes, group, count, blocks, block_bytes, fields, field_count)
        if scales.address != 0:
            bits = non_finite_rows(group, blocks, block_bytes, scales)
            if bits != 0 and load_i64(broken) < 0:
                store_i64(broken, first + trailing_zeros(bits))
