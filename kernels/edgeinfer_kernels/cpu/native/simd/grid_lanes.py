"""Levels from the grids of the IQ types: table look-ups by gather, signs, and their eighth bits."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgeinfer_kernels.cpu.native.simd.lanes import (
    I8,
    I32,
    I64,
    LANES,
    LaneVector,
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
word_pairs = LaneVector(I64, LANES, "word_pairs")  # sixteen lanes of eight bytes


def _table(builder: Any, name: str, words: Sequence[int]) -> Any:
    """The address of a constant array of the module."""
    array = ir.ArrayType(I32, len(words))
    table = ir.GlobalVariable(builder.module, array, name)
    table.linkage, table.global_constant = "internal", True
    table.initializer = ir.Constant(array, list(words))
    return builder.bitcast(table, I8.as_pointer())


def _by_loads(builder: Any, table: Any, indices: Any, element: Any) -> Any:
    """One load for each lane."""
    start, size = builder.ptrtoint(table, I64), I64(element.width // 8)
    found = ir.Constant(ir.VectorType(element, LANES), ir.Undefined)
    for lane in map(I32, range(LANES)):
        index = builder.zext(builder.extract_element(indices, lane), I64)
        value = load(builder, builder.add(start, builder.mul(index, size)), element)
        found = builder.insert_element(found, value, lane)
    return found


def _by_gathers(features: str, builder: Any, table: Any, indices: Any, element: Any) -> Any:
    """Gathers of as many elements as a register holds: 512 bits, or 256 with AVX2."""
    wide = "+avx512f" in features
    count, nbytes = (512 if wide else 256) // element.width, element.width // 8
    zeros, parts = constant_lanes(element, count, 0), LANES // count
    kind = ("dpi" if nbytes == 4 else "dpq") if wide else ("d.d" if nbytes == 4 else "d.q")
    name = f"llvm.x86.avx512.mask.gather.{kind}.512" if wide else f"llvm.x86.avx2.gather.{kind}.256"
    mask = constant_lanes(ir.IntType(1), count, 1) if wide else constant_lanes(element, count, -1)
    scale = I32(nbytes) if wide else I8(nbytes)
    found = []
    for index in range(parts):
        lanes = part(builder, indices, index, parts) if parts > 1 else indices
        found.append(call(builder, name, zeros.type, [zeros, table, lanes, mask, scale]))
    return join(builder, found)


def _look_up(features: str, builder: Any, table: Any, indices: Any, element: Any) -> Any:
    if "+avx512f" in features or "+avx2" in features:
        return _by_gathers(features, builder, table, indices, element)
    return _by_loads(builder, table, indices, element)


def word_lookup(name: str, words: Sequence[int]) -> Any:
    """An intrinsic that maps each lane, an index, through a table of four bytes each. The table is `name` in
    the object file.
    """

    def look_up(features, builder, indices):
        table = _table(builder, name, words)
        return as_bytes(builder, _look_up(features, builder, table, indices, I32))

    return operation(bytes64, (int16x,))(look_up)


def pair_lookup(name: str, words: Sequence[int]) -> Any:
    """As `word_lookup`, for a table of two words each: `first_words` and `second_words` of the result."""

    def look_up(features, builder, indices):
        table = _table(builder, name, words)
        return _look_up(features, builder, table, indices, I64)

    return operation(word_pairs, (int16x,))(look_up)


def _words_of_pairs(builder: Any, pairs: Any, second: int) -> Any:
    words = builder.bitcast(pairs, ir.VectorType(I32, 2 * LANES))
    picks = ir.Constant(WORDS, list(range(second, 2 * LANES, 2)))
    return as_bytes(builder, builder.shuffle_vector(words, ir.Constant(words.type, ir.Undefined), picks))


@operation(bytes64, (word_pairs,))
def first_words(builder, pairs):
    return _words_of_pairs(builder, pairs, 0)


@operation(bytes64, (word_pairs,))
def second_words(builder, pairs):
    return _words_of_pairs(builder, pairs, 1)


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
    """Levels up to 253; 2 is added in lanes where `signs` is 0."""
    plain = builder.icmp_signed("==", signs, constant_lanes(I32, LANES, 0))
    two = builder.select(plain, constant_lanes(I32, LANES, 0x02020202), constant_lanes(I32, LANES, 0))
    return as_bytes(builder, builder.add(as_words(builder, levels), two))


@operation(bytes64, (int16x,))
def spread_four_pairs(builder, x):
    """Bits 0..7 of each lane, two at a time, to its four bytes."""
    low = builder.and_(x, constant_lanes(I32, LANES, 255))
    spread = low
    for count in (6, 12, 18):
        spread = builder.or_(spread, builder.shl(low, constant_lanes(I32, LANES, count)))
    return as_bytes(builder, builder.and_(spread, constant_lanes(I32, LANES, 0x03030303)))
