"""Extends `softmax_tiles.py` for a 4-bit cache: two codes per byte, minus 8.

A byte of a key holds two adjacent dimensions; a byte of a value holds one element of each half of a group.
Their scales are used as in an 8-bit cache, see `softmax_q8_0.py`. The Hadamard transform of queries and
results is in `attention.py`.
"""

from llvmlite import ir

from edgeinfer_kernels.cpu.native.simd.byte_lanes import load_unsigned_bytes, shift_right
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.four_vectors import add_products
from edgeinfer_kernels.cpu.native.simd.lanes import (
    F32,
    I32,
    LANES,
    call,
    constant_lanes,
    float16x,
    int16x,
    operation,
)
from edgeinfer_kernels.cpu.runtime.abi import SCALED

GROUP_BYTES = SCALED // 2


@operation(float16x, (int16x,))
def low_nibble_as_float(features, builder, x):
    """The low four bits of each lane minus 8.

    Uses a table if the CPU has a lookup for sixteen lanes; otherwise the bits become the low mantissa bits of
    2²³.
    """
    floats = ir.VectorType(F32, LANES)
    if "+avx512f" in features:
        table = ir.Constant(floats, [float(code - 8) for code in range(LANES)])
        return call(builder, "llvm.x86.avx512.permvar.sf.512", floats, [table, x])
    code = builder.and_(x, constant_lanes(I32, LANES, 15))
    raised = builder.bitcast(builder.or_(code, constant_lanes(I32, LANES, 0x4B000000)), floats)
    return builder.fsub(raised, constant_lanes(F32, LANES, 2.0**23 + 8))


@device_function
def high_nibble_as_float(x):
    return low_nibble_as_float(shift_right(x, 4))


@device_function
def load_pairs(at, stride):
    """Two dimensions of sixty-four positions: the first of all, then the second."""
    a = load_unsigned_bytes(at)
    b = load_unsigned_bytes(at + stride)
    c = load_unsigned_bytes(at + 2 * stride)
    d = load_unsigned_bytes(at + 3 * stride)
    return (
        low_nibble_as_float(a),
        low_nibble_as_float(b),
        low_nibble_as_float(c),
        low_nibble_as_float(d),
        high_nibble_as_float(a),
        high_nibble_as_float(b),
        high_nibble_as_float(c),
        high_nibble_as_float(d),
    )


@device_function
def add_pairs(query, pairs, total):
    """total + query·key of two dimensions."""
    total = add_products(query, pairs[:4], total)
    return add_products(query + 4, pairs[4:], total)


@device_function
def pairs_bytes(dimensions):
    """Bytes of a key."""
    return dimensions // 2


@device_function
def groups_bytes(dimensions):
    """Bytes of a value: whole groups."""
    return (dimensions + SCALED - 1) // SCALED * GROUP_BYTES


@device_function
def load_two_groups(row, d):
    """Sixty-four elements of a value from `d` on."""
    a = load_unsigned_bytes(row + groups_bytes(d))
    b = load_unsigned_bytes(row + groups_bytes(d) + GROUP_BYTES)
    return low_nibble_as_float(a), high_nibble_as_float(a), low_nibble_as_float(b), high_nibble_as_float(b)


@device_function
def load_half_group(row, d):
    """Sixteen elements of a value from `d` on."""
    codes = load_unsigned_bytes(row + d // SCALED * GROUP_BYTES)
    return low_nibble_as_float(codes) if d % SCALED == 0 else high_nibble_as_float(codes)


rows_of_nibbles = groups_bytes, load_two_groups, load_half_group, 2 * GROUP_BYTES
