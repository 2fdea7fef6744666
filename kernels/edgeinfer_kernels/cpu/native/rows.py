"""Rows of a weight matrix times activations: the templates that every block format fills in.

Weights lie *interleaved by sixteen rows* (see `layout.py`): an element of a block of one row sits beside the
same element of fifteen other rows, so one vector register holds four columns of sixteen rows and one dot
instruction advances sixteen outputs. A format gives only its `unpack`: 32 columns of 16 rows as eight
registers of bytes, with their scales. Scales span 32 or 16 columns; floats have none: hence three templates.

Quantised activations of one token are `columns` int8, then columns/32 float32 scales, then columns/16 int32
sums of the int8 values (`quantise.py` writes them).

Formula: output[t, r] = Σ_b scale[r, b]·s[t, b]·(Σ weights·activations - offset·sum[t, b]) - minimum[r,
b]·s[t, b]·sum[t, b]. Traffic: reads the rows once for every `TOKEN_TILE` tokens, writes rows·tokens·4 bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from edgeinfer_kernels.cpu.native.byte_lanes import (
    add_i32,
    dot_signed,
    dot_unsigned,
    signed_offset,
    splat_i32,
    splat_word,
    to_float,
)
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.float_lanes import (
    add,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.scalars import load_f32, load_i32, prefetch
from edgeinfer_kernels.cpu.structures import CACHE_LINE, TOKEN_TILE

PREFETCH_BYTES = 2048
"""How far ahead decoding asks for weights; measured: 1 to 2 KB is best, 4 KB no better than none."""
ROW_ARGUMENTS = 10
"""weights, columns, first_row, last_row, activations, activation_stride, tokens, output, output_stride,
scratch.

Addresses and strides in bytes. `first_row` is a multiple of 16; `output` has room for whole groups of 16
rows; `scratch` is ROWS_SCRATCH of the calling thread's own.
"""


def make_start(offset: int) -> Any:
    """What the accumulator of a block starts at, for weights that are stored `offset` too high."""

    @inner
    def start(sum_of_activations):
        return splat_i32(types.int32(-offset * sum_of_activations))

    return start


@inner
def signed_start(sum_of_activations):
    return splat_i32(types.int32(-signed_offset() * sum_of_activations))


def decode_super_blocks(accumulate: Any, unpack: Any, group_bytes: int) -> Any:
    """One token's product with a group; eight sub-blocks are written out so that shifts are constant."""
    share = group_bytes // 8

    @inner
    def decode_group(group, blocks, columns, activations):
        total = splat_f32(np.float32(0))
        for block in range(blocks):
            at = group + block * group_bytes
            first = 8 * block
            prefetch_share(at, share)
            total = accumulate(unpack(at, 0), activations, columns, first, total)
            prefetch_share(at + share, share)
            total = accumulate(unpack(at, 1), activations, columns, first + 1, total)
            prefetch_share(at + 2 * share, share)
            total = accumulate(unpack(at, 2), activations, columns, first + 2, total)
            prefetch_share(at + 3 * share, share)
            total = accumulate(unpack(at, 3), activations, columns, first + 3, total)
            prefetch_share(at + 4 * share, share)
            total = accumulate(unpack(at, 4), activations, columns, first + 4, total)
            prefetch_share(at + 5 * share, share)
            total = accumulate(unpack(at, 5), activations, columns, first + 5, total)
            prefetch_share(at + 6 * share, share)
            total = accumulate(unpack(at, 6), activations, columns, first + 6, total)
            prefetch_share(at + 7 * share, share)
            total = accumulate(unpack(at, 7), activations, columns, first + 7, total)
        return total

    return decode_group


def decode_blocks(accumulate: Any, unpack: Any, group_bytes: int) -> Any:
    """One token's product with a group whose blocks are 32 columns."""

    @inner
    def decode_group(group, blocks, columns, activations):
        total = splat_f32(np.float32(0))
        for block in range(blocks):
            at = group + block * group_bytes
            prefetch_share(at, group_bytes)
            total = accumulate(unpack(at, 0), activations, columns, block, total)
        return total

    return decode_group


@inner
def prefetch_share(at, nbytes):
    """Ask for the lines PREFETCH_BYTES behind the next `nbytes`: rows are read once, in order."""
    for line in range(0, nbytes, CACHE_LINE):
        prefetch(at + PREFETCH_BYTES + line)


def make_rows(accumulate: Any, unpack: Any, block_bytes: int, sub_blocks: int) -> Callable[..., None]:
    """The loops over groups of rows, tiles of tokens and blocks, around one format's arithmetic.

    `unpack(block, index)` gives the 32 columns of sub-block `index`; `accumulate(unpacked, activations,
    columns, index, total)` adds their product with one token's activations to `total`.
    """
    group_bytes = 16 * block_bytes
    make_decode = decode_super_blocks if sub_blocks == 8 else decode_blocks
    decode_group = make_decode(accumulate, unpack, group_bytes)

    @inner
    def tile_group(group, blocks, columns, activations, stride, tokens, scratch):
        for token in range(tokens):
            store_floats(scratch + 64 * token, splat_f32(np.float32(0)))
        for block in range(blocks):
            for index in range(sub_blocks):
                unpacked = unpack(group + block * group_bytes, index)
                for token in range(tokens):
                    total = load_floats(scratch + 64 * token)
                    row = activations + token * stride
                    total = accumulate(unpacked, row, columns, block * sub_blocks + index, total)
                    store_floats(scratch + 64 * token, total)

    def rows(
        weights, columns, first_row, last_row, activations, stride, tokens, output, output_stride, scratch
    ):
        blocks = columns // (32 * sub_blocks)
        for index in range(first_row // 16, (last_row + 15) // 16):
            group = weights + index * blocks * group_bytes
            if tokens == 1:
                store_floats(output + 64 * index, decode_group(group, blocks, columns, activations))
                continue
            for first in range(0, tokens, TOKEN_TILE):
                tile = min(TOKEN_TILE, tokens - first)
                tile_group(group, blocks, columns, activations + first * stride, stride, tile, scratch)
                for token in range(tile):
                    place = output + (first + token) * output_stride + 64 * index
                    store_floats(place, load_floats(scratch + 64 * token))

    return rows


def make_halves(dot: Any) -> Any:
    """The products of 32 columns of weights with activations `a`, added to a sum of each half."""

    @inner
    def halves(w, a, first, last):
        first = dot(first, w[0], splat_word(a))
        last = dot(last, w[4], splat_word(a + 16))
        first = dot(first, w[1], splat_word(a + 4))
        last = dot(last, w[5], splat_word(a + 20))
        first = dot(first, w[2], splat_word(a + 8))
        last = dot(last, w[6], splat_word(a + 24))
        first = dot(first, w[3], splat_word(a + 12))
        last = dot(last, w[7], splat_word(a + 28))
        return first, last

    return halves


halves_unsigned = make_halves(dot_unsigned)
halves_signed = make_halves(dot_signed)


@inner
def half_sums(activations, columns, index):
    """The sums of the two halves of 32 activations."""
    sums = activations + columns + columns // 8 + 8 * index
    return load_i32(sums), load_i32(sums + 4)


@inner
def activation_scale(activations, columns, index):
    return load_f32(activations + columns + 4 * index)


def rows_of_32(
    unpack: Any, block_bytes: int, sub_blocks: int = 1, *, signed: bool = False, offset: int = 0
) -> Callable[..., None]:
    """One scale and no minimum for 32 columns; `unpack` -> (w0, …, w7, scale)."""
    halves = halves_signed if signed else halves_unsigned
    start = signed_start if signed else make_start(offset)

    @inner
    def accumulate(unpacked, activations, columns, index, total):
        sums = half_sums(activations, columns, index)
        begin = start(sums[0] + sums[1])
        both = halves(unpacked, activations + 32 * index, begin, splat_i32(types.int32(0)))
        scale = multiply(unpacked[8], splat_f32(activation_scale(activations, columns, index)))
        return multiply_add(to_float(add_i32(both[0], both[1])), scale, total)

    return make_rows(accumulate, unpack, block_bytes, sub_blocks)


def rows_of_32_with_minimum(unpack: Any, block_bytes: int, sub_blocks: int = 1) -> Callable[..., None]:
    """One scale and one minimum (subtracted) for 32 columns; `unpack` -> (w0, …, w7, scale, minimum)."""

    @inner
    def accumulate(unpacked, activations, columns, index, total):
        zero = splat_i32(types.int32(0))
        both = halves_unsigned(unpacked, activations + 32 * index, zero, zero)
        scale = activation_scale(activations, columns, index)
        scaled = multiply(unpacked[8], splat_f32(scale))
        total = multiply_add(to_float(add_i32(both[0], both[1])), scaled, total)
        sums = half_sums(activations, columns, index)
        return multiply_add(unpacked[9], splat_f32(np.float32(-(sums[0] + sums[1])) * scale), total)

    return make_rows(accumulate, unpack, block_bytes, sub_blocks)


def rows_of_16(unpack: Any, block_bytes: int, sub_blocks: int, *, offset: int) -> Callable[..., None]:
    """Two scales for 32 columns; `unpack` -> (w0, …, w7, scale of the first 16, scale of the last 16)."""
    start = make_start(offset)

    @inner
    def accumulate(unpacked, activations, columns, index, total):
        sums = half_sums(activations, columns, index)
        both = halves_unsigned(unpacked, activations + 32 * index, start(sums[0]), start(sums[1]))
        weighted = multiply(to_float(both[0]), unpacked[8])
        weighted = multiply_add(to_float(both[1]), unpacked[9], weighted)
        scale = activation_scale(activations, columns, index)
        return multiply_add(weighted, splat_f32(scale), total)

    return make_rows(accumulate, unpack, block_bytes, sub_blocks)


def rows_of_16_with_minimum(unpack: Any, block_bytes: int, sub_blocks: int) -> Callable[..., None]:
    """Two scales and two minima for 32 columns; `unpack` -> (w0, …, w7, scale, scale, minimum, minimum)."""

    @inner
    def accumulate(unpacked, activations, columns, index, total):
        zero = splat_i32(types.int32(0))
        both = halves_unsigned(unpacked, activations + 32 * index, zero, zero)
        sums = half_sums(activations, columns, index)
        weighted = multiply(to_float(both[0]), unpacked[8])
        weighted = multiply_add(to_float(both[1]), unpacked[9], weighted)
        weighted = multiply_add(unpacked[10], splat_f32(np.float32(-sums[0])), weighted)
        weighted = multiply_add(unpacked[11], splat_f32(np.float32(-sums[1])), weighted)
        scale = activation_scale(activations, columns, index)
        return multiply_add(weighted, splat_f32(scale), total)

    return make_rows(accumulate, unpack, block_bytes, sub_blocks)


def rows_of_floats(load_column: Any, element_bytes: int) -> Callable[..., None]:
    """Unquantised weights; activations are float32 rows; columns are a multiple of four."""
    column_bytes = 16 * element_bytes

    def rows(
        weights, columns, first_row, last_row, activations, stride, tokens, output, output_stride, scratch
    ):
        for index in range(first_row // 16, (last_row + 15) // 16):
            group = weights + index * columns * column_bytes
            for token in range(tokens):
                x = activations + token * stride
                t0 = splat_f32(np.float32(0))
                t1 = splat_f32(np.float32(0))
                t2 = splat_f32(np.float32(0))
                t3 = splat_f32(np.float32(0))
                for column in range(0, columns, 4):
                    w = group + column * column_bytes
                    a = x + 4 * column
                    t0 = multiply_add(load_column(w), splat_f32(load_f32(a)), t0)
                    t1 = multiply_add(load_column(w + column_bytes), splat_f32(load_f32(a + 4)), t1)
                    t2 = multiply_add(load_column(w + 2 * column_bytes), splat_f32(load_f32(a + 8)), t2)
                    t3 = multiply_add(load_column(w + 3 * column_bytes), splat_f32(load_f32(a + 12)), t3)
                store_floats(output + token * output_stride + 64 * index, add(add(t0, t1), add(t2, t3)))

    return rows
