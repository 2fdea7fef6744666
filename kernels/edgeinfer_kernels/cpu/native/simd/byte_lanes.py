"""Vectors of sixteen int32, and of sixteen times four bytes."""

from typing import Any

from llvmlite import ir
from numba import types

from edgeinfer_kernels.cpu.native.simd.lanes import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    Emitter,
    address,
    as_bytes,
    as_words,
    bytes64,
    call,
    constant_lanes,
    float16x,
    int16x,
    join,
    load,
    operation,
    part,
    shuffled,
    splat,
    store,
)
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS, STARTS


@operation(int16x, (types.int32,))
def splat_i32(builder, scalar):
    return splat(builder, scalar, LANES)


@operation(int16x, (address,))
def load_ints(builder, at):
    return load(builder, at, ir.VectorType(I32, LANES))


@operation(int16x, (address,))
def load_unsigned_bytes(builder, at):
    return builder.zext(load(builder, at, ir.VectorType(I8, LANES)), ir.VectorType(I32, LANES))


@operation(int16x, (address,))
def load_signed_bytes(builder, at):
    return builder.sext(load(builder, at, ir.VectorType(I8, LANES)), ir.VectorType(I32, LANES))


@operation(int16x, (address,))
def load_unsigned_shorts(builder, at):
    return builder.zext(load(builder, at, ir.VectorType(I16, LANES)), ir.VectorType(I32, LANES))


@operation(types.void, (address, int16x))
def store_as_bytes(builder, at, vector):
    store(builder, builder.trunc(vector, ir.VectorType(I8, LANES)), at)


@operation(types.int32, (int16x,))
def lanes_sum_i32(builder, x):
    for _ in range(4):
        x = builder.add(part(builder, x, 0, 2), part(builder, x, 1, 2))
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.void, (address, int16x, int16x, types.float32))
def store_scale_and_sums(builder, block, first, last, scale):
    """Store the numbers of a block of activations: the scale, the scale times the sum of all lanes, of those
    of `first` and of those of `last`; then STARTS.
    """
    x = join(builder, [builder.add(part(builder, v, 0, 2), part(builder, v, 1, 2)) for v in (first, last)])
    for distance in (4, 2, 1):
        x = builder.add(x, shuffled(builder, x, [lane ^ distance for lane in range(LANES)]))
    whole = builder.add(x, shuffled(builder, x, [lane ^ 8 for lane in range(LANES)]))
    picks = ir.Constant(ir.VectorType(I32, 4), [LANES, LANES, 0, 8])
    sums = builder.shuffle_vector(x, whole, picks)
    scaled = builder.fmul(builder.sitofp(sums, ir.VectorType(F32, 4)), splat(builder, scale, 4))
    floats = builder.insert_element(scaled, scale, I32(0))
    store(builder, floats, builder.add(block, ir.Constant(block.type, ACTIVATIONS.scale)))
    lanes = [("all", "first", "last").index(columns) + 1 for columns, _ in STARTS]
    factors = ir.Constant(ir.VectorType(I32, len(STARTS)), [-offset for _, offset in STARTS])
    starts = builder.mul(shuffled(builder, sums, lanes), factors)
    store(builder, starts, builder.add(block, ir.Constant(block.type, ACTIVATIONS.starts)))


@operation(float16x, (int16x,))
def to_float(builder, x):
    return builder.sitofp(x, ir.VectorType(F32, LANES))


@operation(float16x, (int16x,))
def bits_to_float(builder, x):
    return builder.bitcast(x, ir.VectorType(F32, LANES))


@operation(int16x, (float16x,))
def float_bits(builder, x):
    return builder.bitcast(x, ir.VectorType(I32, LANES))


@operation(int16x, (int16x, int16x))
def add_i32(builder, x, y):
    return builder.add(x, y)


@operation(int16x, (int16x, int16x))
def or_i32(builder, x, y):
    return builder.or_(x, y)


@operation(int16x, (int16x, int16x))
def maximum_i32(builder, x, y):
    return builder.select(builder.icmp_signed(">", x, y), x, y)


@operation(int16x, (int16x, int16x))
def minimum_i32(builder, x, y):
    return builder.select(builder.icmp_signed("<", x, y), x, y)


@operation(float16x, (float16x, int16x, types.int32))
def zero_where_equal(builder, x, words, value):
    """x, but 0 in lanes whose word equals `value`."""
    equal = builder.icmp_signed("==", words, splat(builder, value, LANES))
    return builder.select(equal, constant_lanes(F32, LANES, 0), x)


@operation(int16x, (int16x, types.int32))
def and_i32(builder, x, mask):
    return builder.and_(x, splat(builder, mask, LANES))


@operation(int16x, (int16x, types.int32))
def shift_right(builder, x, count):
    """Logical shift of each lane."""
    return builder.lshr(x, splat(builder, count, LANES))


@operation(int16x, (int16x, types.int32))
def signed_byte(builder, x, index):
    """Byte `index` of each lane, sign-extended."""
    left = builder.sub(ir.Constant(I32, 24), builder.shl(index, ir.Constant(I32, 3)))
    raised = builder.shl(x, splat(builder, left, LANES))
    return builder.ashr(raised, constant_lanes(I32, LANES, 24))


@operation(float16x, (bytes64, types.int32))
def signed_byte_as_float(builder, x, index):
    """Byte `index` of each lane."""
    left = builder.sub(I32(24), builder.mul(index, I32(8)))
    raised = builder.shl(as_words(builder, x), splat(builder, left, LANES))
    lowered = builder.ashr(raised, constant_lanes(I32, LANES, 24))
    return builder.sitofp(lowered, ir.VectorType(F32, LANES))


@operation(float16x, (bytes64, types.int32))
def byte_above_128(builder, x, index):
    """128 + byte `index` of each lane, which is below 128: its bits become the upper mantissa bits."""
    words = as_words(builder, x)
    shift_args = ir.Constant(I32, 16), builder.mul(index, I32(8))
    upwards = builder.shl(words, splat(builder, builder.sub(*shift_args), LANES))
    downwards = builder.lshr(words, splat(builder, builder.sub(*reversed(shift_args)), LANES))
    goes_up = builder.icmp_signed("<", index, I32(3))
    moved = builder.select(goes_up, upwards, downwards)
    bits = builder.or_(
        builder.and_(moved, constant_lanes(I32, LANES, 0xFF0000)), constant_lanes(I32, LANES, 0x43000000)
    )
    return builder.bitcast(bits, ir.VectorType(F32, LANES))


@operation(int16x, (int16x, types.int32))
def shift_left(builder, x, count):
    return builder.shl(x, splat(builder, count, LANES))


@operation(types.int32, (bytes64,))
def first_word(builder, x):
    """The first four bytes, one column after the other."""
    return builder.extract_element(as_words(builder, x), ir.Constant(I32, 0))


@operation(bytes64, (address,))
def load_bytes(builder, at):
    return load(builder, at, ir.VectorType(I8, 64))


@operation(int16x, (address,))
def splat_word(builder, at):
    """Four consecutive bytes, the same in every lane."""
    return splat(builder, load(builder, at, I32), LANES)


@operation(bytes64, (bytes64, types.int32, types.int32))
def bits_of_bytes(features, builder, x, shift, mask):
    """(byte >> shift) & mask, for a mask that clears the bits that the shift of whole words moves across
    bytes. ARM shifts bytes.
    """
    if "+neon" in features:
        shifted = builder.lshr(x, splat(builder, builder.trunc(shift, I8), 64))
        return builder.and_(shifted, splat(builder, builder.trunc(mask, I8), 64))
    shifted = builder.lshr(as_words(builder, x), splat(builder, shift, LANES))
    mask_bytes = splat(builder, builder.trunc(mask, I8), 64)
    return builder.and_(as_bytes(builder, shifted), mask_bytes)


@operation(bytes64, (bytes64, types.int32))
def shift_bytes_left(builder, x, count):
    """byte << count, for bytes whose high `count` bits are 0."""
    return as_bytes(builder, builder.shl(as_words(builder, x), splat(builder, count, LANES)))


@operation(bytes64, (bytes64, types.int32))
def shift_bytes_right(builder, x, count):
    """byte >> count, for bytes whose low `count` bits are 0."""
    return as_bytes(builder, builder.lshr(as_words(builder, x), splat(builder, count, LANES)))


@operation(bytes64, (bytes64, bytes64))
def or_bytes(builder, x, y):
    return builder.or_(x, y)


@operation(bytes64, (int16x,))
def spread_four_bits(builder, x):
    """Bits 0..3 of each lane to bit 0 of its four bytes."""
    low = builder.and_(x, constant_lanes(I32, LANES, 15))
    spread = builder.mul(low, constant_lanes(I32, LANES, 0x00204081))
    return as_bytes(builder, builder.and_(spread, constant_lanes(I32, LANES, 0x01010101)))


@operation(types.int64, (address,))
def nonzero_bytes(builder, at):
    """Bit i is set if byte i of 32 is not 0."""
    some = builder.icmp_signed("!=", load(builder, at, ir.VectorType(I8, 32)), constant_lanes(I8, 32, 0))
    return builder.zext(builder.bitcast(some, I32), ir.IntType(64))


def _interleaved(element: ir.Type, count: int, high: bool) -> Any:
    """An emitter: interleaves the elements of the low or high halves of each 16 bytes of x and y.

    This is one instruction on registers of 16-byte parts (`punpckl…`, `zip1`).
    """
    half = count // 2
    picks = [
        lane * count + half * high + index + which * 4 * count
        for lane in range(4)
        for index in range(half)
        for which in (0, 1)
    ]

    def interleave(builder, x, y):
        shape = ir.VectorType(element, 4 * count)
        mask = ir.Constant(ir.VectorType(I32, 4 * count), picks)
        interleaved = builder.shuffle_vector(builder.bitcast(x, shape), builder.bitcast(y, shape), mask)
        return as_bytes(builder, interleaved)

    return operation(bytes64, (bytes64, bytes64))(interleave)


interleave_low_bytes, interleave_high_bytes = (_interleaved(I8, 16, high) for high in (False, True))
interleave_low_shorts, interleave_high_shorts = (_interleaved(I16, 8, high) for high in (False, True))


def by_halves(builder: Any, emit: Emitter, *vectors: Any) -> Any:
    """Apply `emit` to the low halves and to the high halves of vectors, and join the results."""
    halves = [emit(*(part(builder, vector, half, 2) for vector in vectors)) for half in (0, 1)]
    return join(builder, halves)


def table_lookup(table: tuple[int, ...]) -> Any:
    """An intrinsic that maps each byte 0..15 of a vector through a table of 16 int8."""
    row = [value - 256 if value > 127 else value for value in table]

    def look_up(features, builder, indices):
        if "+avx512bw" in features:
            constant = ir.Constant(ir.VectorType(I8, 64), row * 4)
            return call(builder, "llvm.x86.avx512.pshuf.b.512", constant.type, [constant, indices])
        if "+avx2" in features:
            constant = ir.Constant(ir.VectorType(I8, 32), row * 2)
            return by_halves(
                builder,
                lambda half: call(builder, "llvm.x86.avx2.pshuf.b", constant.type, [constant, half]),
                indices,
            )
        if "+neon" in features:
            constant = ir.Constant(ir.VectorType(I8, 16), row)
            name = "llvm.aarch64.neon.tbl1.v16i8"
            return join(
                builder,
                [
                    call(builder, name, constant.type, [constant, part(builder, indices, i, 4)])
                    for i in range(4)
                ],
            )
        value = constant_lanes(I8, 64, row[0])
        for index in range(1, 16):
            here = builder.icmp_signed("==", indices, constant_lanes(I8, 64, index))
            value = builder.select(here, constant_lanes(I8, 64, row[index]), value)
        return value

    return operation(bytes64, (bytes64,))(look_up)
