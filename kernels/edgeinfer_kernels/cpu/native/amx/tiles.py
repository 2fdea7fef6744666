"""Tile registers: eight tiles of sixteen rows of 64 bytes, and the product of two bfloat16 tiles.

If the target has AMX, every operation is its instruction. Otherwise tiles are in memory and ordinary vector
code computes the same result, slowly, so that code based on tiles can be tested on every CPU. All operations
take `state`, TILE_STATE_BYTES of thread-private memory: the tile configuration, the previous configuration to
restore, and the emulated tiles. Source: Intel 64 and IA-32 manual, volume 1, chapter 18.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    address,
    call,
    constant_lanes,
    float16x,
    load,
    operation,
    splat,
    store,
)
from edgeinfer_kernels.cpu.native.simd.scalars import store_i8, store_i16, store_i64
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, TILE_BYTES

TILES = 8
ROWS_PER_TILE = 16


def has_tiles(features: str) -> bool:
    return "+amx-bf16" in features


def _pointer(builder: Any, at: Any) -> Any:
    return builder.inttoptr(at, I8.as_pointer())


def _offset(builder: Any, at: Any, offset: int) -> Any:
    return builder.add(at, ir.Constant(I64, offset))


def _register(builder: Any, state: Any, tile: int) -> Any:
    """Address of an emulated tile."""
    return _offset(builder, state, 2 * CACHE_LINE + TILE_BYTES * tile)


@operation(types.void, (address,))
def _exchange_configuration(features, builder, state):
    if has_tiles(features):
        saved = _offset(builder, state, CACHE_LINE)
        call(builder, "llvm.x86.sttilecfg", ir.VoidType(), [_pointer(builder, saved)])
        call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_pointer(builder, state)])


@operation(types.void, (address,))
def end_tiles(features, builder, state):
    """Restore the configuration that `begin_tiles` saved: usually none, which releases the tiles."""
    if has_tiles(features):
        saved = _offset(builder, state, CACHE_LINE)
        call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_pointer(builder, saved)])


@device_function
def begin_tiles(state):
    """Configure all eight tiles at full size on this thread; a library may have set another configuration
    before.
    """
    for i in range(0, CACHE_LINE, 8):
        store_i64(state + i, 0)
    store_i8(state, 1)
    for tile in range(TILES):
        store_i16(state + 16 + 2 * tile, 64)
        store_i8(state + 48 + tile, ROWS_PER_TILE)
    _exchange_configuration(state)


def _rows(tile: int, of_row: Any) -> Any:
    """The emulation of an operation that processes a tile row by row."""

    def emulate(builder: Any, state: Any, *values: Any) -> None:
        with cgutils.for_range(builder, ir.Constant(I64, ROWS_PER_TILE)) as loop:
            row = _offset(builder, _register(builder, state, tile), 0)
            of_row(
                builder,
                builder.add(row, builder.mul(loop.index, ir.Constant(I64, CACHE_LINE))),
                loop.index,
                *values,
            )

    return emulate


def tile_zero(tile: int) -> Any:
    """`tile_zero(tile)(state)`."""

    def clear_row(builder: Any, row: Any, index: Any) -> None:
        store(builder, constant_lanes(I32, LANES, 0), row)

    def zero(features, builder, state):
        if has_tiles(features):
            call(builder, "llvm.x86.tilezero", ir.VoidType(), [ir.Constant(I8, tile)])
        else:
            _rows(tile, clear_row)(builder, state)

    return operation(types.void, (address,))(zero)


def _move(tile: int, instruction: str, move_row: Any) -> Any:
    def move(features, builder, state, at, stride):
        if has_tiles(features):
            operands = [ir.Constant(I8, tile), _pointer(builder, at), stride]
            call(builder, instruction, ir.VoidType(), operands)
        else:
            _rows(tile, move_row)(builder, state, at, stride)

    return operation(types.void, (address, address, types.int64))(move)


def tile_load(tile: int) -> Any:
    """`tile_load(tile)(state, address, stride)`: sixteen rows of 64 bytes."""

    def load_row(builder: Any, row: Any, index: Any, at: Any, stride: Any) -> None:
        source = builder.add(at, builder.mul(index, stride))
        store(builder, load(builder, source, ir.VectorType(I32, LANES)), row)

    return _move(tile, "llvm.x86.tileloadd64", load_row)


def tile_store(tile: int) -> Any:
    """`tile_store(tile)(state, address, stride)`."""

    def store_row(builder: Any, row: Any, index: Any, at: Any, stride: Any) -> None:
        target = builder.add(at, builder.mul(index, stride))
        store(builder, load(builder, row, ir.VectorType(I32, LANES)), target)

    return _move(tile, "llvm.x86.tilestored64", store_row)


def tile_multiply(sums: int, left: int, right: int) -> Any:
    """`tile_multiply(sums, left, right)(state)`: sums[m, n] += Σ_k left[m, k]·right[k, n].

    left: sixteen rows of 32 bfloat16; right: row k holds columns 2k and 2k + 1 of sixteen n, side by side;
    sums: float32.
    """

    def add_row(builder: Any, row: Any, index: Any, state: Any) -> None:
        words, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
        total = load(builder, row, floats)
        low, high = constant_lanes(I32, LANES, 16), constant_lanes(I32, LANES, -65536)
        from_left = _offset(builder, _register(builder, state, left), 0)
        from_left = builder.add(from_left, builder.mul(index, ir.Constant(I64, CACHE_LINE)))
        from_right = _register(builder, state, right)
        for k in range(ROWS_PER_TILE):
            pair = splat(builder, load(builder, _offset(builder, from_left, 4 * k), I32), LANES)
            weights = load(builder, _offset(builder, from_right, CACHE_LINE * k), words)
            for halves in (
                (builder.shl(pair, low), builder.shl(weights, low)),
                (builder.and_(pair, high), builder.and_(weights, high)),
            ):
                a, w = (builder.bitcast(half, floats) for half in halves)
                total = builder.fadd(total, builder.fmul(a, w))
        store(builder, total, row)

    def multiply(features, builder, state):
        if has_tiles(features):
            operands = [ir.Constant(I8, tile) for tile in (sums, left, right)]
            call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), operands)
        else:
            _rows(sums, add_row)(builder, state, state)

    return operation(types.void, (address,))(multiply)


def _rounded(builder: Any, x: Any) -> Any:
    """The bits of float32 plus half a unit in the last place of bfloat16: the high 16 bits are then rounded
    to nearest.
    """
    words = builder.bitcast(x, ir.VectorType(I32, LANES))
    return builder.add(words, constant_lanes(I32, LANES, 0x8000))


@operation(types.void, (address, float16x, float16x))
def store_bfloat_pairs(features, builder, at, even, odd):
    """Two columns of sixteen rows, as a row of `right` in `tile_multiply`."""
    low = builder.lshr(_rounded(builder, even), constant_lanes(I32, LANES, 16))
    high, mask = _rounded(builder, odd), constant_lanes(I32, LANES, -65536)
    if has_tiles(features):  # low | high & mask; LLVM would generate a shuffle in three steps.
        operands = [low, high, mask, ir.Constant(I32, 0xF8)]
        both = call(builder, "llvm.x86.avx512.pternlog.d.512", low.type, operands)
    else:
        both = builder.or_(low, builder.and_(high, mask))
    store(builder, both, at)


@operation(types.void, (address, float16x))
def store_bfloats(builder, at, x):
    """Sixteen bfloat16, rounded to nearest; a NaN stays NaN for all bit patterns."""
    nan = builder.fcmp_unordered("uno", x, x)
    rounded = builder.select(nan, constant_lanes(I32, LANES, 0x7FC00000), _rounded(builder, x))
    high = builder.lshr(rounded, constant_lanes(I32, LANES, 16))
    store(builder, builder.trunc(high, ir.VectorType(I16, LANES)), at)
