"""Single values in memory, atomics, and calls through addresses."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgeinfer_kernels.cpu.native.simd.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    address,
    call,
    load,
    operation,
    store,
)

YIELD_HINT = 1
INFINITE = 0xFFFFFFFF


@operation(types.int64, (address,))
def load_i64(builder, at):
    return load(builder, at, I64)


@operation(types.void, (address, types.int64))
def store_i64(builder, at, value):
    store(builder, value, at)


@operation(types.int32, (address,))
def load_i32(builder, at):
    return load(builder, at, I32)


@operation(types.void, (address, types.int32))
def store_i32(builder, at, value):
    store(builder, value, at)


@operation(types.void, (address, types.int64))
def store_i16(builder, at, value):
    store(builder, builder.trunc(value, I16), at)


@operation(types.int64, (address,))
def load_u16(builder, at):
    return builder.zext(load(builder, at, I16), I64)


@operation(types.int64, (address,))
def load_u8(builder, at):
    return builder.zext(load(builder, at, I8), I64)


@operation(types.void, (address, types.int64))
def store_i8(builder, at, value):
    store(builder, builder.trunc(value, I8), at)


@operation(types.float32, (address,))
def load_f32(builder, at):
    return load(builder, at, F32)


@operation(types.void, (address, types.float32))
def store_f32(builder, at, value):
    store(builder, value, at)


@operation(types.int64, (types.int64,))
def trailing_zeros(builder, bits):
    """The index of the lowest set bit; `bits` is not 0."""
    return call(builder, "llvm.cttz.i64", I64, [bits, ir.Constant(ir.IntType(1), 1)])


@operation(types.int64, (types.int64,))
def count_ones(builder, bits):
    """The number of set bits."""
    return call(builder, "llvm.ctpop.i64", I64, [bits])


@operation(types.void, (address,))
def prefetch(builder, at):
    pointer = builder.inttoptr(at, I8.as_pointer())
    arguments = [pointer, *(ir.Constant(I32, n) for n in (0, 3, 1))]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


@operation(types.int64, (address, types.int64))
def atomic_add(builder, at, value):
    return builder.atomic_rmw("add", builder.inttoptr(at, I64.as_pointer()), value, "seq_cst")


@operation(types.int64, (address,))
def atomic_load(builder, at):
    return builder.load_atomic(builder.inttoptr(at, I64.as_pointer()), "seq_cst", 8)


@operation(types.void, (address, types.int64))
def atomic_store(builder, at, value):
    builder.store_atomic(value, builder.inttoptr(at, I64.as_pointer()), "seq_cst", 8)


@operation(types.int64, (address, types.int64, types.int64))
def atomic_replace(builder, at, seen, value):
    """Store `value` if the word is `seen`; 1 if it was, else 0."""
    pointer = builder.inttoptr(at, I64.as_pointer())
    result = builder.cmpxchg(pointer, seen, value, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(result, 1), I64)


@operation(types.void, (address, address, types.int64))
def wait_on_address(builder, function, word, seen):
    """Windows' WaitOnAddress: returns when the int64 at `word` may no longer be `seen`."""
    slot = cgutils.alloca_once(builder, I64)
    builder.store(seen, slot)
    values = [word, builder.ptrtoint(slot, I64), ir.Constant(I64, 8), ir.Constant(I64, INFINITE)]
    function_type = ir.FunctionType(I32, [I64] * len(values))
    builder.call(builder.inttoptr(function, function_type.as_pointer()), values)


@operation(types.int64, (address, types.int64, address, types.int64, types.int64))
def call_read(builder, function, file, target, nbytes, offset):
    """The C function pread: the number of bytes read, negative for an error."""
    function_type = ir.FunctionType(I64, [I32, I64, I64, I64])
    values = [builder.trunc(file, I32), target, nbytes, offset]
    return builder.call(builder.inttoptr(function, function_type.as_pointer()), values)


@operation(types.void, ())
def spin_pause(features, builder):
    if "sse2" in features:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif "+neon" in features:
        call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, YIELD_HINT)])
    else:
        builder.fence("acquire")


@operation(types.int32, ())
def has_wide_registers(features, builder):
    """1 if the target has 32 registers of 64 bytes, else 0."""
    return ir.Constant(I32, int("+avx512f" in features))


def _call_pointer(count: int) -> Any:
    def call_pointer(builder, function, *values):
        function_type = ir.FunctionType(ir.VoidType(), [I64] * count)
        builder.call(builder.inttoptr(function, function_type.as_pointer()), values)

    return operation(types.void, (address,) + (types.int64,) * count)(call_pointer)


call_pointer_0 = _call_pointer(0)
call_pointer_1 = _call_pointer(1)
call_pointer_2 = _call_pointer(2)
call_pointer_4 = _call_pointer(4)
call_pointer_6 = _call_pointer(6)
call_pointer_10 = _call_pointer(10)
