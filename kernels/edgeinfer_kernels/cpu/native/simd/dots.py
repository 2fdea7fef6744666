"""Dot products of bytes: sixteen rows' weights with one token's int8 activations.

The implementation depends on the target. VNNI multiplies four bytes and adds them to an int32 in one
instruction. It needs unsigned weights, so 128 is added to signed ones beforehand (`raise_signed`). AVX2 adds
pairs of products in int16, and accumulates several registers before it widens if the weights are small
enough.
"""

from typing import Any

from llvmlite import ir
from numba import types

from edgeinfer_kernels.cpu.native.simd.arm_dots import (
    LARGEST_ACTIVATION,
    LARGEST_INT16,
    dot_by_instruction,
    dot_by_widening,
    dot_of_four_tokens,
    splat_words,
)
from edgeinfer_kernels.cpu.native.simd.lanes import (
    I8,
    I16,
    I32,
    LANES,
    LaneVector,
    address,
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
    shuffled,
    splat,
)
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS, STARTS


def has_unsigned_instruction(features: str) -> bool:
    return "+avx512vnni" in features or "+avxvnni" in features


RAISED_BY = 128


@operation(bytes64, (bytes64,))
def raise_signed(features, builder, weights):
    """Signed weights in the form that the dot product of this target needs: with RAISED_BY added, or as they
    are.
    """
    if not has_unsigned_instruction(features):
        return weights
    return builder.xor(weights, constant_lanes(I8, 64, -128))


def _by_instruction(
    features: str, builder: Any, total: Any, weights: list[Any], activations: list[Any]
) -> Any:
    """VNNI: u8·s8, four products a lane."""
    if "+avx512vnni" in features:
        for w, a in zip(weights, activations, strict=True):
            operands = [total, as_words(builder, w), a]
            total = call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, operands)
        return total
    totals = [part(builder, total, half, 2) for half in (0, 1)]
    for w, a in zip(weights, activations, strict=True):
        for half in (0, 1):
            signed = part(builder, a, half, 2)
            operands = [totals[half], part(builder, as_words(builder, w), half, 2), signed]
            totals[half] = call(builder, "llvm.x86.avx512.vpdpbusd.256", totals[half].type, operands)
    return join(builder, totals)


def _by_pairs(
    builder: Any, total: Any, weights: list[Any], activations: list[Any], signed: bool, largest: int
) -> Any:
    """AVX2: pairs of products in int16, accumulated as long as they cannot overflow, then in int32.

    Signed weights: uses their magnitudes, and moves the signs to the activations.
    """
    words, ones = ir.VectorType(I32, 8), constant_lanes(I16, 16, 1)
    fitting = max(1, LARGEST_INT16 // (2 * largest * LARGEST_ACTIVATION))
    totals = [part(builder, total, half, 2) for half in (0, 1)]
    narrow: list[Any] = [None, None]
    for index, (w, a) in enumerate(zip(weights, activations, strict=True)):
        signs = as_bytes(builder, a)
        last = index % fitting == fitting - 1 or index == len(weights) - 1
        for half in (0, 1):
            pairs = _pairs(builder, part(builder, w, half, 2), part(builder, signs, half, 2), signed)
            narrow[half] = pairs if narrow[half] is None else builder.add(narrow[half], pairs)
            if last:
                wide = call(builder, "llvm.x86.avx2.pmadd.wd", words, [narrow[half], ones])
                totals[half] = builder.add(totals[half], wide)
                narrow[half] = None
    return join(builder, totals)


def _pairs(builder: Any, weight: Any, activation: Any, signed: bool) -> Any:
    """Sums of two products each, int16; 256 bits."""
    if signed:
        sign = "llvm.x86.avx2.psign.b"
        activation = call(builder, sign, weight.type, [activation, weight])
        weight = call(builder, sign, weight.type, [weight, weight])
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [weight, activation])


def _by_widening(builder: Any, total: Any, weights: list[Any], activations: list[Any], signed: bool) -> Any:
    """Ordinary LLVM: widen to int16, multiply, and add the four products of each lane."""
    shorts, words = ir.VectorType(I16, 64), ir.VectorType(I32, LANES)
    for w, a in zip(weights, activations, strict=True):
        wide = (builder.sext if signed else builder.zext)(w, shorts)
        products = builder.mul(wide, builder.sext(as_bytes(builder, a), shorts))
        for offset in range(4):
            mask = ir.Constant(words, [4 * lane + offset for lane in range(LANES)])
            picked = builder.shuffle_vector(products, ir.Constant(shorts, ir.Undefined), mask)
            total = builder.add(total, builder.sext(picked, words))
    return total


def _add_dot(
    features: str,
    builder: Any,
    total: Any,
    weights: list[Any],
    activations: list[Any],
    signed: bool,
    largest: int,
) -> Any:
    """The total plus the sum with the best method of the target; weights and activations are vectors of four
    columns per lane.
    """
    if has_unsigned_instruction(features):
        return _by_instruction(features, builder, total, weights, activations)
    if "+avx2" in features:
        return _by_pairs(builder, total, weights, activations, signed, largest)
    if "+dotprod" in features:
        return dot_by_instruction(builder, total, weights, activations)
    if "+neon" in features:
        return builder.add(total, dot_by_widening(builder, weights, activations, largest))
    return _by_widening(builder, total, weights, activations, signed)


def _shared_words(features: str, builder: Any, at: Any, count: int) -> list[Any]:
    """`count` consecutive words of activations, each in all lanes."""
    if "+neon" in features:
        return splat_words(builder, at, count)
    words = [load(builder, builder.add(at, ir.Constant(at.type, 4 * index)), I32) for index in range(count)]
    return [splat(builder, word, LANES) for word in words]


def _words_of_lanes(features: str, builder: Any, at: Any, count: int) -> list[Any]:
    """`count` words of activations of each lane, interleaved."""
    shape = ir.VectorType(I32, LANES)
    return [load(builder, builder.add(at, ir.Constant(at.type, 64 * index)), shape) for index in range(count)]


def _stored_start(columns: str, offset: int) -> tuple[int, int]:
    """(distance, offset) of a sum of these columns in a block: that for the offset, if it is stored."""
    of_columns = [each for each in STARTS if each[0] == columns]
    found = (columns, offset) if (columns, offset) in STARTS else of_columns[-1]
    return ACTIVATIONS.starts + 4 * STARTS.index(found), found[1]


def dot_start(columns: str, offset: int, *, signed: bool, by_lanes: bool = False) -> Any:
    """An intrinsic: the total from which the dot product with a block of activations starts, so that it is
    that of the weights without their offset, or without what `raise_signed` added.

    This is -offset·Σ activations, for sixteen lanes; `columns`: "all", "first" or "last". `by_lanes`: every
    lane has a different block, sixteen of them interleaved by words.
    """
    lanes = LANES if by_lanes else 1

    def start(features, builder, activations):
        added = RAISED_BY if signed and has_unsigned_instruction(features) else offset
        if added == 0:
            return constant_lanes(I32, LANES, 0)
        distance, stored_offset = _stored_start(columns, added)
        at = builder.add(activations, ir.Constant(activations.type, lanes * distance))
        stored = load(builder, at, ir.VectorType(I32, lanes))
        negated = builder.sdiv(stored, constant_lanes(I32, lanes, stored_offset), flags=("exact",))
        product = builder.mul(negated, constant_lanes(I32, lanes, added))
        return shuffled(builder, product, [lane % lanes for lane in range(LANES)])

    return operation(int16x, (address,))(start)


def dot_sum(registers: int, *, signed: bool, largest: int, by_lanes: bool = False) -> Any:
    """An intrinsic: total + Σ weights·activations of 4·`registers` columns, for sixteen lanes as int32.

    Its arguments are the total, the weights, four columns per register, from `raise_signed`, and the address
    of the activations: four bytes per register for all lanes or, with `by_lanes`, four bytes for each lane.
    `largest`: upper bound of the weights' magnitudes.
    """

    def dot(features, builder, total, *operands):
        *weights, at = operands
        words = (_words_of_lanes if by_lanes else _shared_words)(features, builder, at, registers)
        return _add_dot(features, builder, total, weights, words, signed, largest)

    return operation(int16x, (int16x, *(bytes64,) * registers, address))(dot)


FOUR_TOKENS = 4
int16x_of_tokens = LaneVector(I32, FOUR_TOKENS * LANES, "int16x_of_tokens")  # sixteen int32 of each token


def dot_product_of_tokens(registers: int, *, largest: int) -> Any:
    """As `dot_sum` from 0 for FOUR_TOKENS tokens: its last arguments are the activations of the first token
    and the distance between tokens in bytes.
    """

    def dot(features, builder, *operands):
        *weights, at, stride = operands
        tokens = [builder.add(at, builder.mul(stride, ir.Constant(at.type, i))) for i in range(FOUR_TOKENS)]
        if "+i8mm" in features:
            return dot_of_four_tokens(builder, weights, tokens)
        words = [_shared_words(features, builder, each, registers) for each in tokens]
        zeros = constant_lanes(I32, LANES, 0)
        sums = [_add_dot(features, builder, zeros, weights, each, True, largest) for each in words]
        return join(builder, sums)

    return operation(int16x_of_tokens, (*(bytes64,) * registers, address, types.int64))(dot)


def _sums_of_token(token: int) -> Any:
    def sums_of_token(builder, sums):
        return part(builder, sums, token, FOUR_TOKENS)

    return operation(int16x, (int16x_of_tokens,))(sums_of_token)


SUMS_OF_TOKENS = tuple(_sums_of_token(token) for token in range(FOUR_TOKENS))
