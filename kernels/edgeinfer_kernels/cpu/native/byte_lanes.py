"""Sixteen int32, sixteen times four bytes, and the dot products that multiply them."""

from typing import Any

from llvmlite import ir
from numba import types

from edgeinfer_kernels.cpu.native.lanes import (
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
    splat,
    store,
)


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


@operation(float16x, (int16x,))
def to_float(builder, x):
    return builder.sitofp(x, ir.VectorType(F32, LANES))


@operation(float16x, (int16x,))
def bits_to_float(builder, x):
    return builder.bitcast(x, ir.VectorType(F32, LANES))


@operation(int16x, (int16x, int16x))
def add_i32(builder, x, y):
    return builder.add(x, y)


@operation(int16x, (int16x, int16x))
def or_i32(builder, x, y):
    return builder.or_(x, y)


@operation(int16x, (int16x, int16x))
def maximum_i32(builder, x, y):
    return builder.select(builder.icmp_signed(">", x, y), x, y)


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


@operation(int16x, (int16x, types.int32))
def shift_left(builder, x, count):
    return builder.shl(x, splat(builder, count, LANES))


@operation(bytes64, (address,))
def load_bytes(builder, at):
    return load(builder, at, ir.VectorType(I8, 64))


@operation(int16x, (address,))
def splat_word(builder, at):
    """Four consecutive bytes, the same in every lane."""
    return splat(builder, load(builder, at, I32), LANES)


@operation(bytes64, (bytes64, types.int32, types.int32))
def bits_of_bytes(builder, x, shift, mask):
    """(byte >> shift) & mask, for a mask that clears what the shift of whole words drags across bytes."""
    shifted = builder.lshr(as_words(builder, x), splat(builder, shift, LANES))
    mask_bytes = splat(builder, builder.trunc(mask, I8), 64)
    return builder.and_(as_bytes(builder, shifted), mask_bytes)


@operation(bytes64, (bytes64, types.int32))
def shift_bytes_left(builder, x, count):
    """byte << count, for bytes whose high `count` bits are clear."""
    return as_bytes(builder, builder.shl(as_words(builder, x), splat(builder, count, LANES)))


@operation(bytes64, (bytes64, bytes64))
def or_bytes(builder, x, y):
    return builder.or_(x, y)


@operation(bytes64, (int16x,))
def spread_four_bits(builder, x):
    """Bits 0..3 of each lane to bit 0 of its four bytes."""
    low = builder.and_(x, constant_lanes(I32, LANES, 15))
    spread = builder.mul(low, constant_lanes(I32, LANES, 0x00204081))
    return as_bytes(builder, builder.and_(spread, constant_lanes(I32, LANES, 0x01010101)))


def _by_halves(builder: Any, emit: Emitter, *vectors: Any) -> Any:
    halves = [emit(*(part(builder, vector, half, 2) for vector in vectors)) for half in (0, 1)]
    return join(builder, halves)


def _multiply_pairs(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """AVX2: u8·s8 pairs to i16 (no overflow for |weight| <= 128), i16 pairs to i32; 256 bits."""
    words, shorts = ir.VectorType(I32, 8), ir.VectorType(I16, 16)
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [unsigned, signed])
    ones = constant_lanes(I16, 16, 1)
    return builder.add(acc, call(builder, "llvm.x86.avx2.pmadd.wd", words, [pairs, ones]))


def _widened_dot(builder: Any, acc: Any, weights: Any, activations: Any, signed: bool) -> Any:
    """Plain LLVM: widen to i16, multiply, and add the four products of each lane."""
    shorts = ir.VectorType(I16, 64)
    wide_weights = (builder.sext if signed else builder.zext)(weights, shorts)
    products = builder.mul(wide_weights, builder.sext(activations, shorts))
    for offset in range(4):
        mask = ir.Constant(ir.VectorType(I32, LANES), [4 * lane + offset for lane in range(LANES)])
        picked = builder.shuffle_vector(products, ir.Constant(shorts, ir.Undefined), mask)
        acc = builder.add(acc, builder.sext(picked, ir.VectorType(I32, LANES)))
    return acc


def _dot_by_instruction(features: str, builder: Any, acc: Any, weights: Any, activations: Any) -> Any | None:
    """u8·s8 through one instruction, or None where the target has none."""
    if "+avx512vnni" in features:
        words = ir.VectorType(I32, 16)
        operands = [acc, as_words(builder, weights), activations]
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", words, operands)
    if "+avxvnni" in features:
        words = ir.VectorType(I32, 8)
        name = "llvm.x86.avx512.vpdpbusd.256"
        return _by_halves(
            builder,
            lambda *v: call(builder, name, words, list(v)),
            acc,
            as_words(builder, weights),
            activations,
        )
    return None


@operation(int16x, (int16x, bytes64, int16x))
def dot_unsigned(features, builder, acc, weights, activations):
    """Weights of 0..127 in u8, activations in s8."""
    by_instruction = _dot_by_instruction(features, builder, acc, weights, activations)
    if by_instruction is not None:
        return by_instruction
    signed = as_bytes(builder, activations)
    if "+avx2" in features:
        return _by_halves(builder, lambda *v: _multiply_pairs(builder, *v), acc, weights, signed)
    if "+dotprod" in features:
        return _neon_dot(builder, acc, weights, signed)
    return _widened_dot(builder, acc, weights, signed, signed=False)


def _neon_dot(builder: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Four sdot of 128 bits; right for unsigned weights too while they stay below 128."""
    words = ir.VectorType(I32, 4)
    quarters = []
    for index in range(4):
        operands = [part(builder, vector, index, 4) for vector in (acc, weights, activations)]
        quarters.append(call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", words, operands))
    return join(builder, quarters)


def has_unsigned_instruction(features: str) -> bool:
    return "+avx512vnni" in features or "+avxvnni" in features


@operation(int16x, (int16x, bytes64, int16x))
def dot_signed(features, builder, acc, weights, activations):
    """Weights and activations in s8. Where the instruction wants unsigned weights they are raised by 128:
    the caller starts the accumulator at -`signed_offset()`·(sum of the activations)."""
    signed = as_bytes(builder, activations)
    if has_unsigned_instruction(features):
        raised = builder.xor(weights, constant_lanes(I8, 64, -128))
        return _dot_by_instruction(features, builder, acc, raised, activations)
    if "+avx2" in features:

        def by_sign(acc: Any, weights: Any, signed: Any) -> Any:
            half = ir.VectorType(I8, 32)
            magnitude = call(builder, "llvm.x86.avx2.psign.b", half, [weights, weights])
            flipped = call(builder, "llvm.x86.avx2.psign.b", half, [signed, weights])
            return _multiply_pairs(builder, acc, magnitude, flipped)

        return _by_halves(builder, by_sign, acc, weights, signed)
    if "+dotprod" in features:
        return _neon_dot(builder, acc, weights, signed)
    return _widened_dot(builder, acc, weights, signed, signed=True)


@operation(types.int32, ())
def signed_offset(features, builder):
    """What `dot_signed` adds to every weight on this target: 128 or 0."""
    return ir.Constant(I32, 128 if has_unsigned_instruction(features) else 0)


def table_lookup(table: tuple[int, ...]) -> Any:
    """An intrinsic that maps each byte 0..15 of a vector through a table of 16 int8."""
    row = [value - 256 if value > 127 else value for value in table]

    def look_up(features, builder, indices):
        if "+avx512bw" in features:
            constant = ir.Constant(ir.VectorType(I8, 64), row * 4)
            return call(builder, "llvm.x86.avx512.pshuf.b.512", constant.type, [constant, indices])
        if "+avx2" in features:
            constant = ir.Constant(ir.VectorType(I8, 32), row * 2)
            return _by_halves(
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
