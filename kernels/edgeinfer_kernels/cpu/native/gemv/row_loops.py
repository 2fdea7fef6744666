"""The loops over rows, tokens and blocks around the arithmetic of `rows.py`.

One token: a group of sixteen rows at a time, with its sums in a register. A few tokens: the same, with a
block unpacked once for all of them; as long as memory is the bottleneck, they cost little more than one.
More: tiles of TOKEN_TILE tokens, whose activations stay in the L1 or L2 cache while all rows are processed; a
block of two groups is unpacked once per tile.

Traffic: reads the rows once per TOKEN_TILE tokens, writes rows·tokens·4 bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from edgeinfer_kernels.cpu.native.gemv.rows import (
    SUMS_PITCH,
    RowFormat,
    make_accumulate,
    make_accumulate_tokens,
    unpack_for_dots,
)
from edgeinfer_kernels.cpu.native.simd.dots import FOUR_TOKENS
from edgeinfer_kernels.cpu.native.simd.exports import device_function, inline_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import load_floats, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.simd.scalars import prefetch
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_BYTES, CACHE_LINE, FEW_TOKENS, TOKEN_TILE

PREFETCH_BYTES = 16384
"""Prefetch distance of weights: the bytes that a memory with 400 ns latency under load delivers in that time
at 40 GB/s. Measured on a Zen 5, one thread, Q5_K: 13 GB/s without, 22 with 2 KB, 28 with 4 KB, 29 from 8 KB
on; reading alone 37. On two threads Q4_K and Q6_K gain 4 and 7 % more from 16 KB.
"""
TILE_PREFETCH_BYTES = 2048
"""The same if two groups are read at once and a tile's activations fill the L1 cache: with 8 KB for each
group, eight tokens of Q4_0 took 1.9 times as long.
"""


@device_function
def prefetch_share(at, nbytes, ahead):
    """Prefetch the lines `ahead` bytes after the next `nbytes`: rows are read once, in order."""
    for line in range(0, nbytes, CACHE_LINE):
        prefetch(at + ahead + line)


def decode_super_blocks(accumulate: Any, unpack: Any, group_bytes: int) -> Any:
    """The product of one token with a group; eight sub-blocks are unrolled, so that shifts are constant.

    Two sub-blocks that share bytes are adjacent, without a prefetch in between, which would cause the bytes
    to be loaded twice.
    """
    share = group_bytes // 4

    @device_function
    def decode_group(group, blocks, activations):
        total = splat_f32(np.float32(0))
        for block in range(blocks):
            at = group + block * group_bytes
            a = activations + 8 * ACTIVATION_BYTES * block
            prefetch_share(at, share, PREFETCH_BYTES)
            total = accumulate(unpack(at, 0), a, total)
            total = accumulate(unpack(at, 1), a + ACTIVATION_BYTES, total)
            prefetch_share(at + share, share, PREFETCH_BYTES)
            total = accumulate(unpack(at, 2), a + 2 * ACTIVATION_BYTES, total)
            total = accumulate(unpack(at, 3), a + 3 * ACTIVATION_BYTES, total)
            prefetch_share(at + 2 * share, share, PREFETCH_BYTES)
            total = accumulate(unpack(at, 4), a + 4 * ACTIVATION_BYTES, total)
            total = accumulate(unpack(at, 5), a + 5 * ACTIVATION_BYTES, total)
            prefetch_share(at + 3 * share, share, PREFETCH_BYTES)
            total = accumulate(unpack(at, 6), a + 6 * ACTIVATION_BYTES, total)
            total = accumulate(unpack(at, 7), a + 7 * ACTIVATION_BYTES, total)
        return total

    return decode_group


def decode_blocks(accumulate: Any, unpack: Any, group_bytes: int) -> Any:
    """The product of one token with a group, for blocks of 32 columns."""

    @device_function
    def decode_group(group, blocks, activations):
        total = splat_f32(np.float32(0))
        for block in range(blocks):
            at = group + block * group_bytes
            prefetch_share(at, group_bytes, PREFETCH_BYTES)
            a = activations + ACTIVATION_BYTES * block
            total = accumulate(unpack(at, 0), a, total)
        return total

    return decode_group


def decode_pairs(accumulate: Any, unpack: Any, group_bytes: int) -> Any:
    """The product of one token with a group, for blocks of 64 columns."""

    @device_function
    def decode_group(group, blocks, activations):
        total = splat_f32(np.float32(0))
        for block in range(blocks):
            at = group + block * group_bytes
            prefetch_share(at, group_bytes, PREFETCH_BYTES)
            a = activations + 2 * ACTIVATION_BYTES * block
            total = accumulate(unpack(at, 0), a, total)
            total = accumulate(unpack(at, 1), a + ACTIVATION_BYTES, total)
        return total

    return decode_group


def decode_quarter_blocks(accumulate: Any, unpack: Any, group_bytes: int) -> Any:
    """The product of one token with a group, for blocks of 128 columns."""

    @device_function
    def decode_group(group, blocks, activations):
        total = splat_f32(np.float32(0))
        for block in range(blocks):
            at = group + block * group_bytes
            prefetch_share(at, group_bytes, PREFETCH_BYTES)
            a = activations + 4 * ACTIVATION_BYTES * block
            total = accumulate(unpack(at, 0), a, total)
            total = accumulate(unpack(at, 1), a + ACTIVATION_BYTES, total)
            total = accumulate(unpack(at, 2), a + 2 * ACTIVATION_BYTES, total)
            total = accumulate(unpack(at, 3), a + 3 * ACTIVATION_BYTES, total)
        return total

    return decode_group


def make_decode(row_format: RowFormat) -> Any:
    """`decode_group(group, blocks, activations)`: sixteen rows times one token."""
    makers = {1: decode_blocks, 2: decode_pairs, 4: decode_quarter_blocks, 8: decode_super_blocks}
    return makers[row_format.sub_blocks](
        make_accumulate(row_format), unpack_for_dots(row_format), row_format.group_bytes
    )


def each_token(tokens: int, accumulate: Any) -> tuple[Any, Any, Any]:
    """Functions over the sums of `tokens` tokens, which stay in registers because all indices are constant,
    and because `step` is inlined however often it is called.

    `zeros()`; `step(unpacked, activations, stride, totals)`, which is `accumulate` for each token; and
    `put(output, stride, totals)`, which stores them.
    """
    if tokens == 1:

        @device_function
        def zero():
            return (splat_f32(np.float32(0)),)

        @inline_function
        def step_one(unpacked, activations, stride, totals):
            return (accumulate(unpacked, activations, totals[0]),)

        @device_function
        def put_one(output, stride, totals):
            store_floats(output, totals[0])

        return zero, step_one, put_one

    last = tokens - 1
    zeros_before, step_before, put_before = each_token(last, accumulate)

    @device_function
    def zeros():
        return (*zeros_before(), splat_f32(np.float32(0)))

    @inline_function
    def step(unpacked, activations, stride, totals):
        before = step_before(unpacked, activations, stride, totals)
        return (*before, accumulate(unpacked, activations + last * stride, totals[last]))

    @device_function
    def put(output, stride, totals):
        put_before(output, stride, totals)
        store_floats(output + last * stride, totals[last])

    return zeros, step, put


def make_fixed(row_format: RowFormat, tokens: int) -> Any:
    """`fixed(group, blocks, activations, stride, output, output_stride)`: a group times `tokens` tokens."""
    unpack = unpack_for_dots(row_format, inlined=True)
    zeros, step, put = each_token(tokens, make_accumulate(row_format))
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks
    share = group_bytes // sub_blocks

    @device_function
    def fixed(group, blocks, activations, stride, output, output_stride):
        totals = zeros()
        for block in range(blocks):
            at = group + block * group_bytes
            a = activations + block * ACTIVATION_BYTES
            prefetch_share(at, group_bytes, PREFETCH_BYTES)
            totals = step(unpack(at, 0), a, stride, totals)
        put(output, output_stride, totals)

    @device_function
    def fixed_pairs(group, blocks, activations, stride, output, output_stride):
        """Two sub-blocks in turn: they may share bytes, which then are loaded once, and their shifts are
        constant. With all eight, Q4_K gained from nothing to 9 % more, depending on the matrix and the number
        of tokens, but compiling took six seconds more for each format.
        """
        totals = zeros()
        for block in range(blocks):
            at = group + block * group_bytes
            for index in range(0, sub_blocks, 2):
                prefetch_share(at + index * share, 2 * share, PREFETCH_BYTES)
                a = activations + (block * sub_blocks + index) * ACTIVATION_BYTES
                totals = step(unpack(at, index), a, stride, totals)
                totals = step(unpack(at, index + 1), a + ACTIVATION_BYTES, stride, totals)
        put(output, output_stride, totals)

    return fixed if sub_blocks == 1 else fixed_pairs


def make_few(row_format: RowFormat) -> Any:
    """`few(group, blocks, activations, stride, tokens, output, output_stride)`: a group times a few tokens.

    All tokens at once: split into four and the rest, seven took 1.14 times as long and eight 1.11 times. A
    fifth token by itself took two to four times as long as an additional one. But each further token count
    adds half a second of compile time.
    """
    two, three, four, five, six, seven, eight = (make_fixed(row_format, n) for n in range(2, FEW_TOKENS + 1))

    @device_function
    def few(group, blocks, activations, stride, tokens, output, output_stride):
        if tokens == 8:
            eight(group, blocks, activations, stride, output, output_stride)
        elif tokens == 7:
            seven(group, blocks, activations, stride, output, output_stride)
        elif tokens == 6:
            six(group, blocks, activations, stride, output, output_stride)
        elif tokens == 5:
            five(group, blocks, activations, stride, output, output_stride)
        elif tokens == 4:
            four(group, blocks, activations, stride, output, output_stride)
        elif tokens == 3:
            three(group, blocks, activations, stride, output, output_stride)
        else:
            two(group, blocks, activations, stride, output, output_stride)

    return few


def make_pair_tile(row_format: RowFormat) -> Any:
    """`pair_tile(group, next_group, blocks, activations, stride, tokens, sums)`.

    The sums of two groups with up to TOKEN_TILE tokens, 128 bytes per token. For targets with enough
    registers for the weights of both groups.
    """
    unpack, accumulate = unpack_for_dots(row_format), make_accumulate(row_format)
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks
    share = group_bytes // sub_blocks

    @device_function
    def pair_tile(group, next_group, blocks, activations, stride, tokens, sums):
        for token in range(2 * tokens):
            store_floats(sums + 64 * token, splat_f32(np.float32(0)))
        for block in range(blocks):
            for index in range(sub_blocks):
                prefetch_share(group + block * group_bytes + index * share, share, TILE_PREFETCH_BYTES)
                prefetch_share(next_group + block * group_bytes + index * share, share, TILE_PREFETCH_BYTES)
                here = unpack(group + block * group_bytes, index)
                other = unpack(next_group + block * group_bytes, index)
                start = activations + (block * sub_blocks + index) * ACTIVATION_BYTES
                for token in range(tokens):
                    at = sums + 128 * token
                    a = start + token * stride
                    first = accumulate(here, a, load_floats(at))
                    second = accumulate(other, a, load_floats(at + 64))
                    store_floats(at, first)
                    store_floats(at + 64, second)

    return pair_tile


def make_single_tile(row_format: RowFormat) -> Any:
    """As `make_pair_tile` for one group: only the first 64 bytes of a token's sums are computed."""
    unpack, accumulate = unpack_for_dots(row_format), make_accumulate(row_format)
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks
    share = group_bytes // sub_blocks

    @device_function
    def single_tile(group, blocks, activations, stride, tokens, sums):
        for token in range(tokens):
            store_floats(sums + 128 * token, splat_f32(np.float32(0)))
        for block in range(blocks):
            for index in range(sub_blocks):
                prefetch_share(group + block * group_bytes + index * share, share, TILE_PREFETCH_BYTES)
                unpacked = unpack(group + block * group_bytes, index)
                start = activations + (block * sub_blocks + index) * ACTIVATION_BYTES
                for token in range(tokens):
                    at = sums + 128 * token
                    store_floats(at, accumulate(unpacked, start + token * stride, load_floats(at)))

    @device_function
    def pair_tile(group, next_group, blocks, activations, stride, tokens, sums):
        single_tile(group, blocks, activations, stride, tokens, sums)
        if next_group != group:
            single_tile(next_group, blocks, activations, stride, tokens, sums + 64)

    return pair_tile


def make_token_tile(row_format: RowFormat) -> Any:
    """As `make_single_tile` for targets that multiply several rows by several tokens in one instruction.

    Only for formats with one scale: sums of 16 columns gain nothing (Q6_K: 98 instead of 94 instructions for
    32 columns, sixteen rows and one token).
    """
    unpack, accumulate = unpack_for_dots(row_format), make_accumulate(row_format)
    accumulate_tokens = make_accumulate_tokens(row_format)
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks
    share = group_bytes // sub_blocks

    @device_function
    def token_tile(group, blocks, activations, stride, tokens, sums):
        for token in range(tokens):
            store_floats(sums + SUMS_PITCH * token, splat_f32(np.float32(0)))
        fours = tokens // FOUR_TOKENS * FOUR_TOKENS
        for block in range(blocks):
            for index in range(sub_blocks):
                prefetch_share(group + block * group_bytes + index * share, share, TILE_PREFETCH_BYTES)
                unpacked = unpack(group + block * group_bytes, index)
                start = activations + (block * sub_blocks + index) * ACTIVATION_BYTES
                for token in range(0, fours, FOUR_TOKENS):
                    accumulate_tokens(unpacked, start + token * stride, stride, sums + SUMS_PITCH * token)
                for token in range(fours, tokens):
                    at = sums + SUMS_PITCH * token
                    store_floats(at, accumulate(unpacked, start + token * stride, load_floats(at)))

    @device_function
    def pair_tile(group, next_group, blocks, activations, stride, tokens, sums):
        token_tile(group, blocks, activations, stride, tokens, sums)
        if next_group != group:
            token_tile(next_group, blocks, activations, stride, tokens, sums + 64)

    return pair_tile


def make_rows(row_format: RowFormat, *, wide: bool, matrices: bool = False) -> Callable[..., None]:
    """The GEMV kernel of a format, for ROW_ARGUMENTS int64. `wide`: the target has 32 registers of 64
    bytes. `matrices`: it multiplies several rows by several tokens in one instruction.
    """
    decode_group = make_decode(row_format)
    if wide:
        pair_tile = make_pair_tile(row_format)
    else:
        pair_tile = (make_token_tile if matrices and row_format.scales == 1 else make_single_tile)(row_format)
    few = make_few(row_format)
    group_bytes, sub_blocks = row_format.group_bytes, row_format.sub_blocks

    def rows(
        weights, columns, first_row, last_row, activations, stride, tokens, output, output_stride, scratch
    ):
        blocks = columns // (32 * sub_blocks)
        row_bytes = blocks * group_bytes
        end = (last_row + 15) // 16
        if tokens == 1:
            for index in range(first_row // 16, end):
                group = weights + index * row_bytes
                store_floats(output + 64 * index, decode_group(group, blocks, activations))
            return
        if wide and tokens <= FEW_TOKENS:
            for index in range(first_row // 16, end):
                few(
                    weights + index * row_bytes,
                    blocks,
                    activations,
                    stride,
                    tokens,
                    output + 64 * index,
                    output_stride,
                )
            return
        for first in range(0, tokens, TOKEN_TILE):
            tile = min(TOKEN_TILE, tokens - first)
            a = activations + first * stride
            for index in range(first_row // 16, end, 2):
                other = min(index + 1, end - 1)
                group = weights + index * row_bytes
                next_group = weights + other * row_bytes
                pair_tile(group, next_group, blocks, a, stride, tile, scratch)
                for token in range(tile):
                    target = output + (first + token) * output_stride
                    store_floats(target + 64 * other, load_floats(scratch + 128 * token + 64))
                    store_floats(target + 64 * index, load_floats(scratch + 128 * token))

    return rows
