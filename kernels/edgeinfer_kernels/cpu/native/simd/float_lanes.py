"""Vectors of sixteen float32, and float16 and bfloat16 in memory."""

from typing import Any

from llvmlite import ir
from numba import types

from edgeinfer_kernels.cpu.native.simd.lanes import (
    F16,
    F32,
    I16,
    I32,
    LANES,
    address,
    call,
    constant_lanes,
    float16x,
    int16x,
    load,
    operation,
    part,
    shuffled,
    splat,
    store,
    stream,
)


@operation(float16x, (types.float32,))
def splat_f32(builder, scalar):
    return splat(builder, scalar, LANES)


@operation(float16x, (address,))
def load_floats(builder, at):
    return load(builder, at, ir.VectorType(F32, LANES))


@operation(types.void, (address, float16x))
def store_floats(builder, at, vector):
    store(builder, vector, at)


@operation(types.void, (address, float16x))
def stream_floats(builder, at, vector):
    """Store to the beginning of a cache line, past the caches."""
    stream(builder, vector, at)


@operation(types.float32, (float16x,))
def first_lane(builder, x):
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(float16x, (float16x,))
def swap_pairs(builder, x):
    """Lanes 1, 0, 3, 2, …"""
    return shuffled(builder, x, [lane ^ 1 for lane in range(LANES)])


@operation(float16x, (address,))
def load_doubled(builder, at):
    """Eight floats, each in two adjacent lanes."""
    eight = load(builder, at, ir.VectorType(F32, LANES // 2))
    return shuffled(builder, eight, [lane // 2 for lane in range(LANES)])


@operation(float16x, (float16x,))
def negate_even(builder, x):
    """x with lanes 0, 2, … negated."""
    even = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane % 2 == 0 for lane in range(LANES)])
    return builder.select(even, builder.fneg(x), x)


@operation(float16x, (float16x, types.int64, types.int64, types.float32))
def keep_lanes(builder, x, first, last, other):
    """The lanes of x from `first` on and before `last`; `other` in those outside."""
    lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    begin, end = (splat(builder, builder.trunc(bound, I32), LANES) for bound in (first, last))
    inside = builder.and_(builder.icmp_signed(">=", lanes, begin), builder.icmp_signed("<", lanes, end))
    return builder.select(inside, x, splat(builder, other, LANES))


@operation(float16x, (float16x, float16x))
def add(builder, x, y):
    return builder.fadd(x, y)


@operation(float16x, (float16x, float16x))
def subtract(builder, x, y):
    return builder.fsub(x, y)


@operation(float16x, (float16x,))
def negative(builder, x):
    return builder.fneg(x)


@operation(float16x, (float16x, float16x))
def multiply(builder, x, y):
    return builder.fmul(x, y)


@operation(float16x, (float16x, float16x))
def divide(builder, x, y):
    return builder.fdiv(x, y)


@operation(float16x, (float16x, float16x, float16x))
def multiply_add(builder, x, y, z):
    """x·y + z; fused if the target supports it, otherwise with two roundings (never a library call)."""
    return call(builder, "llvm.fmuladd.v16f32", ir.VectorType(F32, LANES), [x, y, z])


@operation(float16x, (float16x, float16x, float16x))
def subtract_product(builder, x, y, z):
    """z - x·y, as `multiply_add`."""
    return call(builder, "llvm.fmuladd.v16f32", ir.VectorType(F32, LANES), [builder.fneg(x), y, z])


@operation(float16x, (float16x, float16x))
def maximum(builder, x, y):
    return call(builder, "llvm.maxnum.v16f32", ir.VectorType(F32, LANES), [x, y])


@operation(float16x, (float16x, float16x))
def minimum(builder, x, y):
    return call(builder, "llvm.minnum.v16f32", ir.VectorType(F32, LANES), [x, y])


@operation(float16x, (float16x, types.float32))
def at_most(builder, x, limit):
    """The minimum of each lane and the limit; a NaN stays NaN, unlike with `minimum`."""
    high = splat(builder, limit, LANES)
    return builder.select(builder.fcmp_ordered(">", x, high), high, x)


@operation(float16x, (float16x, types.float32))
def at_least(builder, x, limit):
    """The maximum of each lane and the limit; a NaN stays NaN."""
    low = splat(builder, limit, LANES)
    return builder.select(builder.fcmp_ordered("<", x, low), low, x)


@operation(float16x, (float16x, float16x))
def larger_magnitude(builder, x, y):
    """max(x, |y|) compared as integers, for nonnegative x: a NaN is larger than infinity, so it is kept."""
    words = ir.VectorType(I32, LANES)
    first = builder.bitcast(x, words)
    second = builder.and_(builder.bitcast(y, words), constant_lanes(I32, LANES, 0x7FFFFFFF))
    larger = builder.select(builder.icmp_signed(">", first, second), first, second)
    return builder.bitcast(larger, ir.VectorType(F32, LANES))


@operation(types.float32, (float16x,))
def lanes_max_magnitude(builder, x):
    """The maximum of nonnegative lanes, NaN if there is one."""
    bits = builder.bitcast(x, ir.VectorType(I32, LANES))
    for _ in range(4):
        low, high = part(builder, bits, 0, 2), part(builder, bits, 1, 2)
        bits = builder.select(builder.icmp_signed(">", low, high), low, high)
    return builder.bitcast(builder.extract_element(bits, ir.Constant(I32, 0)), F32)


@operation(types.int64, (float16x,))
def positive_lanes(builder, x):
    """Bit i is set if lane i is above 0, or NaN."""
    above = builder.fcmp_unordered(">", x, constant_lanes(F32, LANES, 0.0))
    return builder.zext(builder.bitcast(above, I16), ir.IntType(64))


@operation(float16x, (float16x,))
def absolute(builder, x):
    return call(builder, "llvm.fabs.v16f32", ir.VectorType(F32, LANES), [x])


@operation(types.float32, (float16x,))
def lanes_max(builder, x):
    for lanes in (8, 4, 2, 1):
        low, high = part(builder, x, 0, 2), part(builder, x, 1, 2)
        x = call(builder, f"llvm.maxnum.v{lanes}f32", ir.VectorType(F32, lanes), [low, high])
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.float32, (float16x,))
def lanes_sum(builder, x):
    for _ in range(4):
        x = builder.fadd(part(builder, x, 0, 2), part(builder, x, 1, 2))
    return builder.extract_element(x, ir.Constant(I32, 0))


def round_to_int(builder: Any, x: Any) -> Any:
    """Nearest int32, ties to even, for |x| < 2²²: adding 1.5·2²³ moves it to the low mantissa bits."""
    magic = constant_lanes(F32, LANES, 12582912.0)
    bits = builder.bitcast(builder.fadd(x, magic), ir.VectorType(I32, LANES))
    return builder.sub(bits, constant_lanes(I32, LANES, 0x4B400000))


@operation(int16x, (float16x,))
def nearest_int(builder, x):
    return round_to_int(builder, x)


@operation(float16x, (int16x,))
def two_to_the(builder, n):
    """2ⁿ for -126 <= n <= 127, built from the exponent bits."""
    biased = builder.add(n, constant_lanes(I32, LANES, 127))
    return builder.bitcast(builder.shl(biased, constant_lanes(I32, LANES, 23)), ir.VectorType(F32, LANES))


def _widen_f16(features: str, builder: Any, bits: Any) -> Any:
    """Sixteen float16 as i16 lanes -> float32. Without hardware support: shift into place and scale by
    2¹¹².
    """
    if "f16c" in features or "fullfp16" in features or "neon" in features:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(F16, LANES)), ir.VectorType(F32, LANES))
    words, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
    wide = builder.zext(bits, words)
    magnitude = builder.shl(
        builder.and_(wide, constant_lanes(I32, LANES, 0x7FFF)), constant_lanes(I32, LANES, 13)
    )
    scaled = builder.fmul(builder.bitcast(magnitude, floats), constant_lanes(F32, LANES, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant_lanes(I32, LANES, 0x7C00 << 13))
    infinite = builder.or_(magnitude, constant_lanes(I32, LANES, 0x7F800000))
    value = builder.select(special, infinite, builder.bitcast(scaled, words))
    sign = builder.shl(builder.and_(wide, constant_lanes(I32, LANES, 0x8000)), constant_lanes(I32, LANES, 16))
    return builder.bitcast(builder.or_(value, sign), floats)


@operation(float16x, (address,))
def load_f16(features, builder, at):
    return _widen_f16(features, builder, load(builder, at, ir.VectorType(I16, LANES)))


@operation(float16x, (int16x,))
def f16_of_bits(features, builder, bits):
    """The float16 in the low 16 bits of each lane."""
    return _widen_f16(features, builder, builder.trunc(bits, ir.VectorType(I16, LANES)))


def _narrow_to_f16(features: str, builder: Any, vector: Any) -> Any:
    """Sixteen float32 -> float16 as i16 lanes, rounded to nearest even.

    Without hardware support: by a float addition that aligns the mantissas.
    """
    shorts = ir.VectorType(I16, LANES)
    if "f16c" in features or "fullfp16" in features or "neon" in features:
        return builder.bitcast(builder.fptrunc(vector, ir.VectorType(F16, LANES)), shorts)
    words, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)

    def lanes(value: int) -> ir.Constant:
        return constant_lanes(I32, LANES, value)

    bits = builder.bitcast(vector, words)
    sign = builder.lshr(builder.and_(bits, lanes(-0x80000000)), lanes(16))
    magnitude = builder.and_(bits, lanes(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, lanes(13)), lanes(1))
    rounded = builder.add(builder.add(magnitude, lanes(-(112 << 23) + 0xFFF)), odd)
    normal = builder.lshr(rounded, lanes(13))
    aligned = builder.fadd(builder.bitcast(magnitude, floats), constant_lanes(F32, LANES, 0.5))
    subnormal = builder.sub(builder.bitcast(aligned, words), lanes(0x3F000000))
    small = builder.icmp_signed("<", magnitude, lanes(113 << 23))
    huge = builder.icmp_signed(">=", magnitude, lanes(0x477FF000))
    nan = builder.icmp_signed(">", magnitude, lanes(0x7F800000))
    value = builder.select(small, subnormal, normal)
    value = builder.select(huge, lanes(0x7C00), value)
    value = builder.select(nan, lanes(0x7E00), value)
    return builder.trunc(builder.or_(value, sign), shorts)


@operation(types.void, (address, float16x))
def store_f16(features, builder, at, vector):
    store(builder, _narrow_to_f16(features, builder, vector), at)


@operation(types.void, (address, float16x))
def scatter_f16(features, builder, at, vector):
    """Sixteen float16, 32 bytes apart: a column of sixteen rows of sixteen."""
    f16_values = _narrow_to_f16(features, builder, vector)
    for lane in range(LANES):
        to = builder.add(at, ir.Constant(at.type, 2 * LANES * lane))
        store(builder, builder.extract_element(f16_values, ir.Constant(I32, lane)), to)


@operation(float16x, (address,))
def load_bfloats(builder, at):
    wide = builder.zext(load(builder, at, ir.VectorType(I16, LANES)), ir.VectorType(I32, LANES))
    return builder.bitcast(builder.shl(wide, constant_lanes(I32, LANES, 16)), ir.VectorType(F32, LANES))
