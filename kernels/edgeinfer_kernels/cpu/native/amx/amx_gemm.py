"""AMX GEMM: rows of a weight matrix times the bfloat16 activations of many tokens, with tile registers.

A *panel* is 32 rows by PANEL_COLUMNS columns of weights as bfloat16, small enough for the L1 cache. It is
unpacked, with the same `unpack` as in all other kernels, while the first 32 tokens are processed, and then
multiplied with all tokens. Sums stay in float32: in tiles within a panel, in scratch between panels.

Activations are in tiles of 16 tokens by 32 columns (written by `quantize.py`), with all columns of 16 tokens
contiguous. Formula: output[t, r] = Σ bfloat16(weight[r, c])·bfloat16(x[t, c]). Both are rounded to 8 bits;
int8 activations are rounded to a 127th of the largest of 32. Traffic: reads the rows once per PANEL_TOKENS
tokens; writes and reads 2 bytes per weight in the L1 cache.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from edgeinfer_kernels.cpu.native.amx.tiles import (
    begin_tiles,
    end_tiles,
    store_bfloat_pairs,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
)
from edgeinfer_kernels.cpu.native.gemv.row_loops import TILE_PREFETCH_BYTES, prefetch_share
from edgeinfer_kernels.cpu.native.gemv.rows import RowFormat
from edgeinfer_kernels.cpu.native.simd.byte_lanes import byte_above_128, signed_byte_as_float
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    negative,
    splat_f32,
    store_floats,
    subtract_product,
)
from edgeinfer_kernels.cpu.runtime.abi import (
    PANEL_COLUMNS,
    PANEL_PAIRS,
    PANEL_TOKENS,
    TILE_BYTES,
    TILE_STATE_BYTES,
)

PANEL = TILE_STATE_BYTES
"""Offset of the panel in a thread's scratch: two groups of PANEL_COLUMNS / 32 tiles."""
PANEL_GROUP = PANEL_COLUMNS // 32 * TILE_BYTES
SUMS = PANEL + 2 * PANEL_GROUP
"""Offset of the sums: for each pair of groups, for each 16 tokens, a tile of each group."""
PAIR_SUMS = PANEL_TOKENS // 16 * 2 * TILE_BYTES

zero_00, zero_01, zero_10, zero_11 = (tile_zero(tile) for tile in range(4))
load_00, load_01, load_10, load_11 = (tile_load(tile) for tile in range(4))
store_00, store_01, store_10, store_11 = (tile_store(tile) for tile in range(4))
load_tokens, load_more_tokens, load_rows, load_more_rows = (tile_load(tile) for tile in range(4, 8))
multiply_00, multiply_01 = tile_multiply(0, 4, 6), tile_multiply(1, 4, 7)
multiply_10, multiply_11 = tile_multiply(2, 5, 6), tile_multiply(3, 5, 7)


def make_store_four_columns(byte: Any) -> Any:
    """`store_four_columns(at, weights, scale, shift)`: two rows of a tile, scale·byte + shift."""

    @device_function
    def store_four_columns(at, weights, scale, shift):
        x0 = multiply_add(byte(weights, 0), scale, shift)
        x1 = multiply_add(byte(weights, 1), scale, shift)
        x2 = multiply_add(byte(weights, 2), scale, shift)
        x3 = multiply_add(byte(weights, 3), scale, shift)
        store_bfloat_pairs(at, x0, x1)
        store_bfloat_pairs(at + 64, x2, x3)

    return store_four_columns


def make_unpack_tile(row_format: RowFormat) -> Any:
    """`unpack_tile(block, index, to)`: 32 columns of sixteen rows as a tile of bfloat16."""
    unpack, offset = row_format.unpack, np.float32(row_format.offset)
    last_scale_at, minimum_at = (8, 9) if row_format.scales == 1 else (9, 10)
    last_minimum_at = minimum_at + row_format.scales - 1
    store_columns = make_store_four_columns(signed_byte_as_float if row_format.signed else byte_above_128)

    @device_function
    def store_tile(u, to, scale, shift, last_scale, last_shift):
        store_columns(to, u[0], scale, shift)
        store_columns(to + 128, u[1], scale, shift)
        store_columns(to + 256, u[2], scale, shift)
        store_columns(to + 384, u[3], scale, shift)
        store_columns(to + 512, u[4], last_scale, last_shift)
        store_columns(to + 640, u[5], last_scale, last_shift)
        store_columns(to + 768, u[6], last_scale, last_shift)
        store_columns(to + 896, u[7], last_scale, last_shift)

    @device_function
    def unpack_signed(block, index, to):
        u = unpack(block, index)
        zero = splat_f32(np.float32(0))
        store_tile(u, to, u[8], zero, u[8], zero)

    @device_function
    def unpack_with_minima(block, index, to):
        u = unpack(block, index)
        above = splat_f32(np.float32(128))
        shift = subtract_product(u[8], above, negative(u[minimum_at]))
        last_shift = subtract_product(u[last_scale_at], above, negative(u[last_minimum_at]))
        store_tile(u, to, u[8], shift, u[last_scale_at], last_shift)

    @device_function
    def unpack_with_offset(block, index, to):
        u = unpack(block, index)
        shift = splat_f32(np.float32(-128) - offset)
        store_tile(u, to, u[8], multiply(u[8], shift), u[last_scale_at], multiply(u[last_scale_at], shift))

    if row_format.minima:
        return unpack_with_minima
    return unpack_signed if row_format.signed else unpack_with_offset


@device_function
def multiply_32_tokens(state, activations, other, panel, steps):
    """Tiles 0..3 += 32 tokens times the panel's two groups, over `steps` tiles of columns."""
    for step in range(steps):
        at = TILE_BYTES * step
        load_tokens(state, activations + at, 64)
        load_rows(state, panel + at, 64)
        multiply_00(state)
        load_more_rows(state, panel + PANEL_GROUP + at, 64)
        multiply_01(state)
        load_more_tokens(state, other + at, 64)
        multiply_10(state)
        multiply_11(state)


@device_function
def multiply_16_tokens(state, activations, panel, steps):
    for step in range(steps):
        at = TILE_BYTES * step
        load_tokens(state, activations + at, 64)
        load_rows(state, panel + at, 64)
        multiply_00(state)
        load_more_rows(state, panel + PANEL_GROUP + at, 64)
        multiply_01(state)


@device_function
def begin_sums(state, sums, fresh, both):
    """Initialize tiles 0..3 with the sums of 16 tokens, or of 32 if `both`: zero if `fresh`."""
    if fresh:
        zero_00(state)
        zero_01(state)
        zero_10(state)
        zero_11(state)
        return
    load_00(state, sums, 64)
    load_01(state, sums + TILE_BYTES, 64)
    if both:
        load_10(state, sums + 2 * TILE_BYTES, 64)
        load_11(state, sums + 3 * TILE_BYTES, 64)


@device_function
def end_sums(state, sums, both):
    store_00(state, sums, 64)
    store_01(state, sums + TILE_BYTES, 64)
    if both:
        store_10(state, sums + 2 * TILE_BYTES, 64)
        store_11(state, sums + 3 * TILE_BYTES, 64)


@device_function
def write_sums(sums, tokens, output, stride, index, other):
    """Write the sums of a pair of groups to the output rows."""
    for token in range(tokens):
        at = sums + token // 16 * 2 * TILE_BYTES + 64 * (token % 16)
        target = output + token * stride
        store_floats(target + 64 * other, load_floats(at + TILE_BYTES))
        store_floats(target + 64 * index, load_floats(at))


def make_multiply_panel(row_format: RowFormat) -> Any:
    """`multiply_panel(group, other, first, steps, activations, all_steps, tokens, state, sums)`.

    Adds the products of columns 32·first to 32·(first + steps) of two groups to their sums, for up to
    PANEL_TOKENS tokens.
    """
    unpack_tile = make_unpack_tile(row_format)
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks
    share = group_bytes // sub_blocks

    @device_function
    def unpack_step(group, step, to):
        at = group + step // sub_blocks * group_bytes
        prefetch_share(at + step % sub_blocks * share, share, TILE_PREFETCH_BYTES)
        unpack_tile(at, step % sub_blocks, to)

    @device_function
    def multiply_panel(group, other, first, steps, activations, all_steps, tokens, state, sums):
        panel = state + PANEL
        for token in range(0, tokens, 32):
            at = activations + (token // 16 * all_steps + first) * TILE_BYTES
            both = tokens - token > 16
            begin_sums(state, sums, first == 0, both)
            if token == 0:
                for step in range(steps):
                    unpack_step(group, first + step, panel + TILE_BYTES * step)
                    unpack_step(other, first + step, panel + PANEL_GROUP + TILE_BYTES * step)
                    if both:
                        more = at + all_steps * TILE_BYTES + TILE_BYTES * step
                        here = at + TILE_BYTES * step
                        multiply_32_tokens(state, here, more, panel + TILE_BYTES * step, 1)
                    else:
                        multiply_16_tokens(state, at + TILE_BYTES * step, panel + TILE_BYTES * step, 1)
            elif both:
                multiply_32_tokens(state, at, at + all_steps * TILE_BYTES, panel, steps)
            else:
                multiply_16_tokens(state, at, panel, steps)
            end_sums(state, sums, both)
            sums += 4 * TILE_BYTES

    return multiply_panel


def make_tile_rows(row_format: RowFormat) -> Callable[..., None]:
    """The AMX GEMM kernel of a format, for ROW_ARGUMENTS int64; the activations' stride is not used."""
    multiply_panel = make_multiply_panel(row_format)
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks

    def tile_rows(
        weights, columns, first_row, last_row, activations, stride, tokens, output, output_stride, scratch
    ):
        all_steps = columns // 32
        row_bytes = all_steps // sub_blocks * group_bytes
        end = (last_row + 15) // 16
        begin_tiles(scratch)
        for token in range(0, tokens, PANEL_TOKENS):
            count = min(PANEL_TOKENS, tokens - token)
            a = activations + token * 2 * columns
            target = output + token * output_stride
            for top in range(first_row // 16, end, 2 * PANEL_PAIRS):
                bottom = min(end, top + 2 * PANEL_PAIRS)
                for first in range(0, all_steps, PANEL_COLUMNS // 32):
                    steps = min(PANEL_COLUMNS // 32, all_steps - first)
                    for index in range(top, bottom, 2):
                        group = weights + index * row_bytes
                        other = weights + min(index + 1, bottom - 1) * row_bytes
                        sums = scratch + SUMS + (index - top) // 2 * PAIR_SUMS
                        multiply_panel(group, other, first, steps, a, all_steps, count, scratch, sums)
                for index in range(top, bottom, 2):
                    sums = scratch + SUMS + (index - top) // 2 * PAIR_SUMS
                    write_sums(sums, count, target, output_stride, index, min(index + 1, bottom - 1))
        end_tiles(scratch)

    return tile_rows
