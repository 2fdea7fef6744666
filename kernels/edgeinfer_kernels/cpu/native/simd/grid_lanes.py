"""Levels from the grids of the IQ types: table look-ups by gather, signs, and their eighth bits."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgeinfer_kernels.cpu.native.simd.lanes import (
    I8,
    I32,
    I64,
    LANES,
    as_bytes,
    as_words,
    bytes64,
    call,
    constant_lanes,
    int16x,
    join,
    load,
    operation,
    part,
)

WORDS = ir.VectorType(I32, LANES)


def _table(builder: Any, name: str, words: Sequence[int]) -> Any:
    """The address of a constant array of the module."""
    array = ir.ArrayType(I32, len(words))
    table = ir.GlobalVariable(builder.module, array, name)
    table.linkage, table.global_constant = "internal", True
    table.initializer = ir.Constant(array, list(words))
    return builder.bitcast(table, I8.as_pointer())


def _by_loads(builder: Any, table: Any, indices: Any) -> Any:
    """One load for each lane."""
    start = builder.ptrtoint(table, I64)
    found = ir.Constant(WORDS, ir.Undefined)
    for lane in map(I32, range(LANES)):
        index = builder.zext(builder.extract_element(indices, lane), I64)
        word = load(builder, builder.add(start, builder.shl(index, I64(2))), I32)
        found = builder.insert_element(found, word, lane)
    return found


def _by_half_gathers(builder: Any, table: Any, indices: Any) -> Any:
    """AVX2: two gathers of eight."""
    halves = []
    for half in (0, 1):
        zeros, mask = constant_lanes(I32, 8, 0), constant_lanes(I32, 8, -1)
        operands = [zeros, table, part(builder, indices, half, 2), mask, I8(4)]
        halves.append(call(builder, "llvm.x86.avx2.gather.d.d.256", zeros.type, operands))
    return join(builder, halves)


def word_lookup(name: str, words: Sequence[int]) -> Any:
    """An intrinsic that maps each lane, an index, through a table of four bytes each. The table is `name` in
    the object file.
    """

    def look_up(features, builder, indices):
        table = _table(builder, name, words)
        if "+avx512f" in features:
            zeros, mask = constant_lanes(I32, LANES, 0), constant_lanes(ir.IntType(1), LANES, 1)
            operands = [zeros, table, indices, mask, I32(4)]
            gather = "llvm.x86.avx512.mask.gather.dpi.512"
            return as_bytes(builder, call(builder, gather, WORDS, operands))
        by = _by_half_gathers if "+avx2" in features else _by_loads
        return as_bytes(builder, by(builder, table, indices))

    return operation(bytes64, (int16x,))(look_up)


@operation(int16x, (int16x,))
def with_parity_bit(builder, x):
    """Codes of seven bits, with the bit 7 that makes the number of set bits even."""
    folded = x
    for count in (4, 2, 1):
        folded = builder.xor(folded, builder.lshr(folded, constant_lanes(I32, LANES, count)))
    parity = builder.and_(folded, constant_lanes(I32, LANES, 1))
    return builder.or_(x, builder.shl(parity, constant_lanes(I32, LANES, 7)))


def signed_above(offset: int) -> Any:
    """An intrinsic: offset plus each byte, or minus it if its bit of the low four of `signs` is set."""

    def signed(builder, magnitudes, signs):
        low = builder.and_(signs, constant_lanes(I32, LANES, 15))
        spread = builder.mul(low, constant_lanes(I32, LANES, 0x00204081))
        bits = as_bytes(builder, builder.and_(spread, constant_lanes(I32, LANES, 0x01010101)))
        mask = builder.sub(constant_lanes(I8, 64, 0), bits)
        negated = builder.sub(builder.xor(magnitudes, mask), mask)
        return builder.add(negated, constant_lanes(I8, 64, offset))

    return operation(bytes64, (bytes64, int16x))(signed)


@operation(bytes64, (bytes64, int16x))
def two_more_unless(builder, levels, signs):
    """Levels that are multiples of 8; 2 is added in lanes where `signs` is 0."""
    plain = builder.icmp_signed("==", signs, constant_lanes(I32, LANES, 0))
    two = builder.select(plain, constant_lanes(I32, LANES, 0x02020202), constant_lanes(I32, LANES, 0))
    return as_bytes(builder, builder.or_(as_words(builder, levels), two))


@operation(bytes64, (int16x,))
def spread_four_pairs(builder, x):
    """Bits 0..7 of each lane, two at a time, to its four bytes."""
    low = builder.and_(x, constant_lanes(I32, LANES, 255))
    spread = low
    for count in (6, 12, 18):
        spread = builder.or_(spread, builder.shl(low, constant_lanes(I32, LANES, count)))
    return as_bytes(builder, builder.and_(spread, constant_lanes(I32, LANES, 0x03030303)))
