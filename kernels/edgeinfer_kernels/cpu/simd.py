"""Vectors of sixteen lanes as numba values: the one layer where kernels meet the processor.

A kernel is written once against these names. Nearly all of them are plain LLVM vector operations, which LLVM
lowers to whatever the target has (one 512-bit instruction, two of 256 bits, four of 128). Only three depend on
the instruction set, chosen by the features that the build was told to target: the four-way byte dot products,
the byte table lookup, and the half-precision conversions.

Addresses are int64. Loads and stores need no alignment.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16

Emitter = Callable[..., Any]


class LaneVector(types.Type):  # type: ignore[misc]
    """The numba type of a SIMD register of `count` elements."""

    def __init__(self, element: ir.Type, count: int, name: str) -> None:
        self.llvm_type = ir.VectorType(element, count)
        super().__init__(name=name)


@register_model(LaneVector)
class LaneVectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """A lane vector is passed as the LLVM vector itself."""

    def __init__(self, manager: Any, vector: LaneVector) -> None:
        super().__init__(manager, vector, vector.llvm_type)


bytes64 = LaneVector(I8, 64, "bytes64")  # sixteen lanes of four bytes
int16x = LaneVector(I32, 16, "int16x")  # sixteen int32
float16x = LaneVector(F32, 16, "float16x")  # sixteen float32
address = types.int64


def target_features(context: Any) -> str:
    """The LLVM feature string that this build targets, `+avx2,+fma,…`."""
    return str(context.codegen().magic_tuple()[2])


def operation(result: Any, arguments: tuple[Any, ...]) -> Callable[[Emitter], Any]:
    """Make a numba intrinsic of fixed types from an emitter of LLVM instructions.

    The emitter gets (builder, *LLVM values); one whose first parameter is named `features` gets the target's
    feature string before them.
    """

    def decorate(emitter: Emitter) -> Any:
        wants_features = emitter.__code__.co_varnames[0] == "features"

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            prefix = (target_features(context),) if wants_features else ()
            emitted = emitter(*prefix, builder, *values)
            return context.get_dummy_value() if result is types.void else emitted

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope = {"signature": result(*arguments), "codegen": codegen}
        exec(f"def {emitter.__name__}(typing_context, {names}):\n    return signature, codegen\n", scope)
        return intrinsic(scope[emitter.__name__])

    return decorate


# Building blocks of emitters.


def constant_lanes(element: ir.Type, count: int, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, count), [value] * count)


def splat(builder: Any, scalar: Any, count: int) -> Any:
    vector_type = ir.VectorType(scalar.type, count)
    undefined = ir.Constant(vector_type, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, constant_lanes(I32, count, 0))


def load(builder: Any, at: Any, of_type: ir.Type) -> Any:
    value = builder.load(builder.inttoptr(at, of_type.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, value: Any, at: Any) -> None:
    builder.store(value, builder.inttoptr(at, value.type.as_pointer())).align = 1


def call(builder: Any, name: str, result: ir.Type, values: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)


def part(builder: Any, vector: Any, index: int, parts: int) -> Any:
    """The index-th of `parts` equal parts of a vector."""
    size = vector.type.count // parts
    mask = ir.Constant(ir.VectorType(I32, size), list(range(index * size, (index + 1) * size)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def join(builder: Any, parts: list[Any]) -> Any:
    """Concatenate vectors of one size; their number is a power of two."""
    while len(parts) > 1:
        size = parts[0].type.count * 2
        mask = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        parts = [
            builder.shuffle_vector(parts[i], parts[i + 1], mask) for i in range(0, len(parts), 2)
        ]
    return parts[0]


def as_words(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, ir.VectorType(I32, 16))


def as_bytes(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, ir.VectorType(I8, 64))


# Scalar memory.


@operation(types.int64, (address,))
def load_i64(builder, at):  # type: ignore[no-untyped-def]
    return load(builder, at, I64)


@operation(types.void, (address, types.int64))
def store_i64(builder, at, value):  # type: ignore[no-untyped-def]
    store(builder, value, at)


@operation(types.int32, (address,))
def load_i32(builder, at):  # type: ignore[no-untyped-def]
    return load(builder, at, I32)


@operation(types.void, (address, types.int32))
def store_i32(builder, at, value):  # type: ignore[no-untyped-def]
    store(builder, value, at)


@operation(types.void, (address, types.int64))
def store_i16(builder, at, value):  # type: ignore[no-untyped-def]
    store(builder, builder.trunc(value, I16), at)


@operation(types.int64, (address,))
def load_u16(builder, at):  # type: ignore[no-untyped-def]
    return builder.zext(load(builder, at, I16), I64)


@operation(types.int64, (address,))
def load_u8(builder, at):  # type: ignore[no-untyped-def]
    return builder.zext(load(builder, at, I8), I64)


@operation(types.void, (address, types.int64))
def store_i8(builder, at, value):  # type: ignore[no-untyped-def]
    store(builder, builder.trunc(value, I8), at)


@operation(types.float32, (address,))
def load_f32(builder, at):  # type: ignore[no-untyped-def]
    return load(builder, at, F32)


@operation(types.void, (address, types.float32))
def store_f32(builder, at, value):  # type: ignore[no-untyped-def]
    store(builder, value, at)


@operation(types.void, (address,))
def prefetch(builder, at):  # type: ignore[no-untyped-def]
    pointer = builder.inttoptr(at, I8.as_pointer())
    arguments = [pointer, *(ir.Constant(I32, n) for n in (0, 3, 1))]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


# Threads.


@operation(types.int64, (address, types.int64))
def atomic_add(builder, at, value):  # type: ignore[no-untyped-def]
    return builder.atomic_rmw("add", builder.inttoptr(at, I64.as_pointer()), value, "seq_cst")


@operation(types.int64, (address,))
def atomic_load(builder, at):  # type: ignore[no-untyped-def]
    return builder.load_atomic(builder.inttoptr(at, I64.as_pointer()), "seq_cst", 8)


@operation(types.void, (address, types.int64))
def atomic_store(builder, at, value):  # type: ignore[no-untyped-def]
    builder.store_atomic(value, builder.inttoptr(at, I64.as_pointer()), "seq_cst", 8)


@operation(types.void, ())
def spin_pause(features, builder):  # type: ignore[no-untyped-def]
    if "sse2" in features:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    else:
        builder.fence("acquire")


def _call_pointer(count: int) -> Any:
    def call_pointer(builder, function, *values):  # type: ignore[no-untyped-def]
        function_type = ir.FunctionType(ir.VoidType(), [I64] * count)
        builder.call(builder.inttoptr(function, function_type.as_pointer()), values)

    return operation(types.void, (address,) + (types.int64,) * count)(call_pointer)


call_pointer_0 = _call_pointer(0)
call_pointer_1 = _call_pointer(1)
call_pointer_4 = _call_pointer(4)
call_pointer_6 = _call_pointer(6)
call_pointer_10 = _call_pointer(10)


# Floats in sixteen lanes.


@operation(float16x, (types.float32,))
def splat_f32(builder, scalar):  # type: ignore[no-untyped-def]
    return splat(builder, scalar, LANES)


@operation(float16x, (address,))
def load_floats(builder, at):  # type: ignore[no-untyped-def]
    return load(builder, at, ir.VectorType(F32, LANES))


@operation(types.void, (address, float16x))
def store_floats(builder, at, vector):  # type: ignore[no-untyped-def]
    store(builder, vector, at)


@operation(float16x, (float16x, float16x))
def add(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.fadd(x, y)


@operation(float16x, (float16x, float16x))
def subtract(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.fsub(x, y)


@operation(float16x, (float16x, float16x))
def multiply(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.fmul(x, y)


@operation(float16x, (float16x, float16x))
def divide(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.fdiv(x, y)


@operation(float16x, (float16x, float16x, float16x))
def multiply_add(builder, x, y, z):  # type: ignore[no-untyped-def]
    """x·y + z; fused where the target fuses, two roundings where it doesn't (never a library call)."""
    return call(builder, "llvm.fmuladd.v16f32", ir.VectorType(F32, LANES), [x, y, z])


@operation(float16x, (float16x, float16x))
def maximum(builder, x, y):  # type: ignore[no-untyped-def]
    return call(builder, "llvm.maxnum.v16f32", ir.VectorType(F32, LANES), [x, y])


@operation(float16x, (float16x, float16x))
def minimum(builder, x, y):  # type: ignore[no-untyped-def]
    return call(builder, "llvm.minnum.v16f32", ir.VectorType(F32, LANES), [x, y])


@operation(float16x, (float16x,))
def absolute(builder, x):  # type: ignore[no-untyped-def]
    return call(builder, "llvm.fabs.v16f32", ir.VectorType(F32, LANES), [x])


@operation(types.float32, (float16x,))
def lanes_max(builder, x):  # type: ignore[no-untyped-def]
    for lanes in (8, 4, 2, 1):
        low, high = part(builder, x, 0, 2), part(builder, x, 1, 2)
        x = call(builder, f"llvm.maxnum.v{lanes}f32", ir.VectorType(F32, lanes), [low, high])
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.float32, (float16x,))
def lanes_sum(builder, x):  # type: ignore[no-untyped-def]
    for _ in range(4):
        x = builder.fadd(part(builder, x, 0, 2), part(builder, x, 1, 2))
    return builder.extract_element(x, ir.Constant(I32, 0))


def round_to_int(builder: Any, x: Any) -> Any:
    """Nearest int32, ties to even, for |x| < 2²²: adding 1.5·2²³ leaves the integer in the low mantissa bits."""
    magic = constant_lanes(F32, LANES, 12582912.0)
    bits = builder.bitcast(builder.fadd(x, magic), ir.VectorType(I32, LANES))
    return builder.sub(bits, constant_lanes(I32, LANES, 0x4B400000))


@operation(int16x, (float16x,))
def nearest_int(builder, x):  # type: ignore[no-untyped-def]
    return round_to_int(builder, x)


@operation(float16x, (int16x,))
def two_to_the(builder, n):  # type: ignore[no-untyped-def]
    """2ⁿ for -126 <= n <= 127, by its exponent bits."""
    biased = builder.add(n, constant_lanes(I32, LANES, 127))
    return builder.bitcast(builder.shl(biased, constant_lanes(I32, LANES, 23)), ir.VectorType(F32, LANES))


# Half precision and bfloat16.


def _widen_half(features: str, builder: Any, bits: Any) -> Any:
    """Sixteen float16 as i16 lanes -> float32. Without hardware: shift into place and scale by 2¹¹²."""
    if "f16c" in features or "fullfp16" in features or "neon" in features:
        return builder.fpext(
            builder.bitcast(bits, ir.VectorType(F16, LANES)), ir.VectorType(F32, LANES)
        )
    words, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
    wide = builder.zext(bits, words)
    magnitude = builder.shl(
        builder.and_(wide, constant_lanes(I32, LANES, 0x7FFF)), constant_lanes(I32, LANES, 13)
    )
    scaled = builder.fmul(builder.bitcast(magnitude, floats), constant_lanes(F32, LANES, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant_lanes(I32, LANES, 0x7C00 << 13))
    infinite = builder.or_(magnitude, constant_lanes(I32, LANES, 0x7F800000))
    value = builder.select(special, infinite, builder.bitcast(scaled, words))
    sign = builder.shl(
        builder.and_(wide, constant_lanes(I32, LANES, 0x8000)), constant_lanes(I32, LANES, 16)
    )
    return builder.bitcast(builder.or_(value, sign), floats)


@operation(float16x, (address,))
def load_halves(features, builder, at):  # type: ignore[no-untyped-def]
    return _widen_half(features, builder, load(builder, at, ir.VectorType(I16, LANES)))


@operation(types.void, (address, float16x))
def store_halves(features, builder, at, vector):  # type: ignore[no-untyped-def]
    """Round to nearest even. Without hardware: by the rounding of a float addition that aligns the mantissas."""
    if "f16c" in features or "fullfp16" in features or "neon" in features:
        store(builder, builder.fptrunc(vector, ir.VectorType(F16, LANES)), at)
        return
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
    store(builder, builder.trunc(builder.or_(value, sign), ir.VectorType(I16, LANES)), at)


@operation(float16x, (address,))
def load_bfloats(builder, at):  # type: ignore[no-untyped-def]
    wide = builder.zext(load(builder, at, ir.VectorType(I16, LANES)), ir.VectorType(I32, LANES))
    return builder.bitcast(
        builder.shl(wide, constant_lanes(I32, LANES, 16)), ir.VectorType(F32, LANES)
    )


# Integers in sixteen lanes.


@operation(int16x, (types.int32,))
def splat_i32(builder, scalar):  # type: ignore[no-untyped-def]
    return splat(builder, scalar, LANES)


@operation(int16x, (address,))
def load_ints(builder, at):  # type: ignore[no-untyped-def]
    return load(builder, at, ir.VectorType(I32, LANES))


@operation(int16x, (address,))
def load_unsigned_bytes(builder, at):  # type: ignore[no-untyped-def]
    return builder.zext(load(builder, at, ir.VectorType(I8, LANES)), ir.VectorType(I32, LANES))


@operation(int16x, (address,))
def load_unsigned_shorts(builder, at):  # type: ignore[no-untyped-def]
    return builder.zext(load(builder, at, ir.VectorType(I16, LANES)), ir.VectorType(I32, LANES))


@operation(types.void, (address, int16x))
def store_as_bytes(builder, at, vector):  # type: ignore[no-untyped-def]
    store(builder, builder.trunc(vector, ir.VectorType(I8, LANES)), at)


@operation(types.int32, (int16x,))
def lanes_sum_i32(builder, x):  # type: ignore[no-untyped-def]
    for _ in range(4):
        x = builder.add(part(builder, x, 0, 2), part(builder, x, 1, 2))
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(float16x, (int16x,))
def to_float(builder, x):  # type: ignore[no-untyped-def]
    return builder.sitofp(x, ir.VectorType(F32, LANES))


@operation(float16x, (int16x,))
def bits_to_float(builder, x):  # type: ignore[no-untyped-def]
    return builder.bitcast(x, ir.VectorType(F32, LANES))


@operation(int16x, (int16x, int16x))
def add_i32(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.add(x, y)


@operation(int16x, (int16x, int16x))
def or_i32(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.or_(x, y)


@operation(int16x, (int16x, int16x))
def maximum_i32(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.select(builder.icmp_signed(">", x, y), x, y)


@operation(int16x, (int16x, types.int32))
def and_i32(builder, x, mask):  # type: ignore[no-untyped-def]
    return builder.and_(x, splat(builder, mask, LANES))


@operation(int16x, (int16x, types.int32))
def shift_right(builder, x, count):  # type: ignore[no-untyped-def]
    """Logical shift of each lane."""
    return builder.lshr(x, splat(builder, count, LANES))


@operation(int16x, (int16x, types.int32))
def signed_byte(builder, x, index):  # type: ignore[no-untyped-def]
    """Byte `index` of each lane, sign-extended."""
    left = builder.sub(ir.Constant(I32, 24), builder.shl(index, ir.Constant(I32, 3)))
    raised = builder.shl(x, splat(builder, left, LANES))
    return builder.ashr(raised, constant_lanes(I32, LANES, 24))


@operation(int16x, (int16x, types.int32))
def shift_left(builder, x, count):  # type: ignore[no-untyped-def]
    return builder.shl(x, splat(builder, count, LANES))


# Bytes: sixteen lanes (rows) of four (columns).


@operation(bytes64, (address,))
def load_bytes(builder, at):  # type: ignore[no-untyped-def]
    return load(builder, at, ir.VectorType(I8, 64))


@operation(int16x, (address,))
def splat_word(builder, at):  # type: ignore[no-untyped-def]
    """Four consecutive bytes, the same in every lane."""
    return splat(builder, load(builder, at, I32), LANES)


@operation(bytes64, (bytes64, types.int32, types.int32))
def bits_of_bytes(builder, x, shift, mask):  # type: ignore[no-untyped-def]
    """(byte >> shift) & mask, for a mask that clears what the shift of whole words drags across bytes."""
    shifted = builder.lshr(as_words(builder, x), splat(builder, shift, LANES))
    mask_bytes = splat(builder, builder.trunc(mask, I8), 64)
    return builder.and_(as_bytes(builder, shifted), mask_bytes)


@operation(bytes64, (bytes64, types.int32))
def shift_bytes_left(builder, x, count):  # type: ignore[no-untyped-def]
    """byte << count, for bytes whose high `count` bits are clear."""
    return as_bytes(builder, builder.shl(as_words(builder, x), splat(builder, count, LANES)))


@operation(bytes64, (bytes64, bytes64))
def or_bytes(builder, x, y):  # type: ignore[no-untyped-def]
    return builder.or_(x, y)


@operation(bytes64, (int16x,))
def spread_four_bits(builder, x):  # type: ignore[no-untyped-def]
    """Bits 0..3 of each lane to bit 0 of its four bytes."""
    low = builder.and_(x, constant_lanes(I32, LANES, 15))
    spread = builder.mul(low, constant_lanes(I32, LANES, 0x00204081))
    return as_bytes(builder, builder.and_(spread, constant_lanes(I32, LANES, 0x01010101)))


# The four-way dot products: acc[lane] += sum over 4 bytes of weight · activation.


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


def _dot_by_instruction(
    features: str, builder: Any, acc: Any, weights: Any, activations: Any
) -> Any | None:
    """u8·s8 through one instruction, or None where the target has none."""
    if "+avx512vnni" in features:
        words = ir.VectorType(I32, 16)
        operands = [acc, as_words(builder, weights), activations]
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", words, operands)
    if "+avxvnni" in features:
        words = ir.VectorType(I32, 8)
        name = "llvm.x86.avx512.vpdpbusd.256"
        return _by_halves(
            builder, lambda *v: call(builder, name, words, list(v)), acc, as_words(builder, weights), activations
        )
    return None


@operation(int16x, (int16x, bytes64, int16x))
def dot_unsigned(features, builder, acc, weights, activations):  # type: ignore[no-untyped-def]
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
def dot_signed(features, builder, acc, weights, activations):  # type: ignore[no-untyped-def]
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
def signed_offset(features, builder):  # type: ignore[no-untyped-def]
    """What `dot_signed` adds to every weight on this target: 128 or 0."""
    return ir.Constant(I32, 128 if has_unsigned_instruction(features) else 0)


def table_lookup(table: tuple[int, ...]) -> Any:
    """An intrinsic that maps each byte 0..15 of a vector through a table of 16 int8."""
    row = [value - 256 if value > 127 else value for value in table]

    def look_up(features, builder, indices):  # type: ignore[no-untyped-def]
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
