"""Rows of a matrix times the int8 activations of up to sixteen tokens, on tensor cores.

A program multiplies 16 to 64 rows. Its warps divide the blocks of a row between them, so each weight is read
once by a program; the sums of the warps are added at the end. A tensor core multiplies the codes of sixteen
weights of each row with the activations as they are; the sums, which are exact, are scaled as those of dot
products are. So the results differ from those of `projections` by the order of float32 sums only.

A thread loads a word of one plane for VECTOR adjacent blocks. That is the part of a row that a tensor core
expects from it, so operands take no shared memory.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import (
    COUNTED_FROM,
    float_of,
    load_scales_at,
    masked_load,
    scaled_sum,
)
from edgeinfer_kernels.cuda.triton_ops.words import (
    BYTE,
    CODEBOOK,
    E4M3,
    NIBBLE,
    NIBBLE_1,
    SIGNED,
    code_value,
    half_of_e4m3,
    look_up,
    low_f16,
    signed_nibbles,
)


@triton.constexpr_function
def _code_bits(code: int) -> int:
    """Bits of the codes that are stored unsigned; 8: they are signed."""
    return {0: 4, 1: 5, 2: 6}.get(code, 8)


@triton.constexpr_function
def _is_centered(code: int, offset: int) -> bool:
    """Whether the offset is half of the range of unsigned codes: then their bits are those of signed ones."""
    bits = _code_bits(code)
    return bits < 8 and offset == 1 << (bits - 1)


@triton.constexpr_function
def _reads_sums(first: tuple[int, ...], second: tuple[int, ...] | None) -> bool:
    """Whether the sums of activations are read: for minimums, or for an offset that the codes don't have."""
    for code, scale, offset, *_ in (first, second or first):
        if scale in (3, 4, 6) or (offset != 0 and not _is_centered(code, offset)):
            return True
    return False


@triton.jit
def _blocks_at(start, GEMV: tl.constexpr):
    """The blocks of the warps from `start` on, (warps, 1, blocks)."""
    VECTOR: tl.constexpr = GEMV.vector
    WARPS: tl.constexpr = GEMV.warps
    blocks = start + tl.arange(0, WARPS)[:, None, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    return tl.max_contiguous(tl.multiple_of(blocks, [1, 1, VECTOR]), [1, 1, VECTOR])[None, None, :, :, :]


@triton.jit
def _lanes():
    """The index of a thread's four bytes of a block, (4, 1, 1, 1, 1), and that of its row of eight."""
    return tl.arange(0, 4)[:, None, None, None, None], tl.arange(0, 8)[None, :, None, None, None]


@triton.jit
def load_rows(
    matrix, first_row, start, MASKED: tl.constexpr, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The words of a tile of the matrix, its scales and its super-block scales, each (4, 8, warps, rows/8,
    blocks), from block `start` on. MASKED: some are beyond the end.
    """
    EIGHTS: tl.constexpr = 2 * GEMV.groups
    PLANES: tl.constexpr = _planes(TILE.code)
    part, own = _lanes()
    blocks = _blocks_at(start, GEMV)
    row = first_row + own + 8 * tl.arange(0, EIGHTS)[None, None, None, :, None] + 0 * part
    inside = (blocks < BLOCKS // GEMV.splits) & (row >= 0)
    pointers = matrix[0] + row * (PLANES * BLOCKS) + blocks
    words = (masked_load(pointers + part * BLOCKS, inside, MASKED),)
    if TILE.code == BYTE:
        words = words + (masked_load(pointers + (4 + part) * BLOCKS, inside, MASKED),)
    else:
        for plane in tl.static_range(PLANES - 4):
            words = words + (masked_load(pointers + (4 + plane) * BLOCKS, inside, MASKED),)
    super_blocks = blocks % (BLOCKS // 8)
    scale, factor = load_scales_at(matrix, row, blocks, super_blocks, inside, BLOCKS, MASKED, TILE)
    return words, scale, factor + 0 * scale


@triton.constexpr_function
def _planes(code: int) -> int:
    return {1: 5, 2: 6, 3: 8}.get(code, 4)


@triton.jit
def load_tokens(
    activations, stride, start, MASKED: tl.constexpr, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The int8 words of the first and of the last sixteen elements of blocks, (4, 8, warps, columns/8, blocks);
    and for the pairs of columns of a thread, (4, 8, warps, columns/8, 2, blocks), the two scales and, with
    SUMS, the two sums.
    """
    EIGHTS: tl.constexpr = GEMV.columns // 8
    END: tl.constexpr = BLOCKS // GEMV.splits
    PARTLY: tl.constexpr = MASKED or GEMV.tokens < GEMV.columns
    part, own = _lanes()
    blocks = _blocks_at(start, GEMV)
    eight = 8 * tl.arange(0, EIGHTS)[None, None, None, :, None]
    token = eight + own
    pointers = activations + token * stride + part * BLOCKS + blocks
    inside = (blocks < END) & (token < GEMV.tokens)
    words = masked_load(pointers, inside, PARTLY), masked_load(pointers + 4 * BLOCKS, inside, PARTLY)
    column = (eight + 2 * part)[:, :, :, :, None, :] + tl.arange(0, 2)[None, None, None, None, :, None]
    column += 0 * own[:, :, :, :, None, :]
    pointers = activations + column * stride + blocks[:, :, :, :, None, :]
    inside = (blocks < END)[:, :, :, :, None, :] & (column < GEMV.tokens)
    scales = (
        masked_load(pointers + 8 * BLOCKS, inside, PARTLY).to(tl.float32, bitcast=True),
        masked_load(pointers + 9 * BLOCKS, inside, PARTLY).to(tl.float32, bitcast=True),
    )
    sums = scales
    if SUMS:
        sums = (
            masked_load(pointers + 10 * BLOCKS, inside, PARTLY),
            masked_load(pointers + 11 * BLOCKS, inside, PARTLY),
        )
    return words, scales, sums


@triton.jit
def _of_blocks(value):
    """A tensor for each block of (…, blocks)."""
    COUNT: tl.constexpr = value.shape[len(value.shape) - 1]
    if COUNT == 1:
        return (tl.reshape(value, value.shape[:-1]),)
    elif COUNT == 2:
        return tl.split(value)
    else:
        even, odd = tl.split(tl.reshape(value, value.shape[:-1] + [2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _of_rows(value, GEMV: tl.constexpr):
    """A value of each row, (4, 8, warps, rows/8), as (warps, rows, columns)."""
    WARPS: tl.constexpr = GEMV.warps
    ROWS: tl.constexpr = 16 * GEMV.groups
    COLUMNS: tl.constexpr = GEMV.columns
    value = tl.reshape(tl.permute(value, (2, 3, 1, 0)), (WARPS, ROWS, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(value, (WARPS, ROWS, COLUMNS // 8, 4, 2)), (WARPS, ROWS, COLUMNS))


@triton.jit
def _of_columns(value, GEMV: tl.constexpr):
    """A value of each column, (4, 8, warps, columns/8, 2), as (warps, rows, columns)."""
    WARPS: tl.constexpr = GEMV.warps
    EIGHTS: tl.constexpr = 2 * GEMV.groups
    COLUMNS: tl.constexpr = GEMV.columns
    value = tl.reshape(tl.permute(value, (2, 1, 3, 0, 4)), (WARPS, 1, 8, COLUMNS))
    return tl.reshape(tl.broadcast_to(value, (WARPS, EIGHTS, 8, COLUMNS)), (WARPS, 8 * EIGHTS, COLUMNS))


@triton.jit
def _bytes(word):
    """The four int8 of words (4, 8, warps, rows/8), a last axis of (2, 2)."""
    first, second = word.to(tl.int8), (word >> 8).to(tl.int8)
    third, fourth = (word >> 16).to(tl.int8), (word >> 24).to(tl.int8)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _operand(low, high):
    """The int8 of two words of each thread, (4, 8, warps, rows/8), as (warps, rows, 32)."""
    joined = tl.join(_bytes(low), _bytes(high))
    WARPS: tl.constexpr = joined.shape[2]
    EIGHTS: tl.constexpr = joined.shape[3]
    return tl.reshape(tl.permute(joined, (2, 3, 1, 0, 6, 4, 5)), (WARPS, 8 * EIGHTS, 32))


@triton.jit
def _codes(words, TILE: tl.constexpr):
    """The codes of the first and the last sixteen elements of blocks, as int8; if the offset is in the middle
    of their range, minus the offset and times 16, 8 or 4.
    """
    part, _ = _lanes()
    CENTERED: tl.constexpr = _is_centered(TILE.code, TILE.offset)
    if TILE.code == BYTE:
        return words[0], words[1]
    elif TILE.code == CODEBOOK:
        word = words[0]
        return look_up(word & 0xFFFF, TILE.codebook), look_up((word >> 16) & 0xFFFF, TILE.codebook)
    elif TILE.code == NIBBLE:
        if CENTERED:
            return signed_nibbles(words[0] << 4), signed_nibbles(words[0])
        else:
            return words[0] & 0x0F0F0F0F, (words[0] >> 4) & 0x0F0F0F0F
    elif TILE.code == NIBBLE_1:
        if CENTERED:
            low = ((words[0] << 3) & 0x78787878) | ((words[1] << (7 - part)) & -0x7F7F7F80)
            high = ((words[0] >> 1) & 0x78787878) | ((words[1] << (3 - part)) & -0x7F7F7F80)
            return low ^ -0x7F7F7F80, high ^ -0x7F7F7F80
        else:
            bits = words[1] >> part
            low = (words[0] & 0x0F0F0F0F) | ((bits << 4) & 0x10101010)
            return low, ((words[0] >> 4) & 0x0F0F0F0F) | (bits & 0x10101010)
    else:
        low = ((words[0] << 2) & 0x3C3C3C3C) | ((words[1] << (6 - 2 * part)) & -0x3F3F3F40)
        high = ((words[0] >> 2) & 0x3C3C3C3C) | ((words[2] << (6 - 2 * part)) & -0x3F3F3F40)
        return low ^ -0x7F7F7F80, high ^ -0x7F7F7F80


@triton.jit
def _unit(TILE: tl.constexpr):
    """What the sums of `_codes` are multiplied by."""
    if _is_centered(TILE.code, TILE.offset):
        return tl.constexpr(1.0 / (1 << (8 - _code_bits(TILE.code))))
    else:
        return tl.constexpr(1.0)


@triton.jit
def _row_scale(scale, factor, UPPER: tl.constexpr, TILE: tl.constexpr):
    """The scale of the first or the last sixteen elements of blocks whose scales differ."""
    if TILE.scale == E4M3:
        return factor.to(tl.float32, bitcast=True) * half_of_e4m3(scale, UPPER)
    else:
        return low_f16(factor) * TILE.unit * code_value(scale ^ 0x8080, UPPER, 128)


@triton.jit
def _with_blocks(total, tile, operands, scales, sums, GEMV: tl.constexpr, TILE: tl.constexpr):
    """The total (warps, rows, columns) plus the products of a tile."""
    CENTERED: tl.constexpr = _is_centered(TILE.code, TILE.offset)
    low, high = _codes(tile[0], TILE)
    lows, highs, scale, factor = _of_blocks(low), _of_blocks(high), _of_blocks(tile[1]), _of_blocks(tile[2])
    VECTOR: tl.constexpr = GEMV.vector
    for block in tl.static_range(VECTOR):
        left = _operand(lows[block], highs[block])
        sum0, sum1 = sums[0][block], sums[1][block]
        from0, from1 = total.to(tl.int32) * 0 + COUNTED_FROM, total.to(tl.int32) * 0 + COUNTED_FROM
        if not CENTERED and TILE.offset != 0:
            from0, from1 = from0 - TILE.offset * sum0, from1 - TILE.offset * sum1
        first = tl.dot(left, operands[block][0], from0, out_dtype=tl.int32)
        second = tl.dot(left, operands[block][1], from1, out_dtype=tl.int32)
        first, second = float_of(first), float_of(second)
        scale0, scale1 = scales[0][block], scales[1][block]
        if TILE.scale == SIGNED or TILE.scale == E4M3:
            total += first * scale0 * _of_rows(_row_scale(scale[block], factor[block], 0, TILE), GEMV)
            total += second * scale1 * _of_rows(_row_scale(scale[block], factor[block], 1, TILE), GEMV)
        else:
            rows = _of_rows(scale[block], GEMV), _of_rows(factor[block], GEMV)
            total += scaled_sum(first, second, rows[0], rows[1], scale0, scale1, sum0, sum1, TILE)
    return total


@triton.jit
def _all_columns(values, GEMV: tl.constexpr):
    """A tensor (warps, rows, columns) for each block of values of columns."""
    result = ()
    parts = _of_blocks(values)
    VECTOR: tl.constexpr = GEMV.vector
    for block in tl.static_range(VECTOR):
        result = result + (_of_columns(parts[block], GEMV),)
    return result


@triton.jit
def with_chunk(totals, tiles, tokens, GEMV: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The totals of one or two matrices plus the products of their tiles."""
    words, scales, sums = tokens
    lows, highs = _of_blocks(words[0]), _of_blocks(words[1])
    operands = ()
    VECTOR: tl.constexpr = GEMV.vector
    for block in tl.static_range(VECTOR):
        nothing = lows[block] * 0
        first = tl.permute(_operand(lows[block], nothing), (0, 2, 1))
        second = tl.permute(_operand(nothing, highs[block]), (0, 2, 1))
        operands = operands + ((first, second),)
    scale = _all_columns(scales[0], GEMV), _all_columns(scales[1], GEMV)
    each = _all_columns(sums[0], GEMV), _all_columns(sums[1], GEMV)
    first = _with_blocks(totals[0], tiles[0], operands, scale, each, GEMV, FIRST)
    if SECOND is None:
        return (first,)
    else:
        return first, _with_blocks(totals[1], tiles[1], operands, scale, each, GEMV, SECOND)


@triton.jit
def _load_chunk(
    matrices, activations, stride, first_row, start, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
    GEMV: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The tiles of the matrices from block `start` on, and the activations."""
    tokens = load_tokens(activations, stride, start, MASKED, BLOCKS, GEMV, _reads_sums(FIRST, SECOND))
    first = load_rows(matrices[0], first_row, start, MASKED, BLOCKS, GEMV, FIRST)
    if SECOND is None:
        return (first,), tokens
    else:
        return (first, load_rows(matrices[1], first_row, start, MASKED, BLOCKS, GEMV, SECOND)), tokens


@triton.jit
def _zeros(GEMV: tl.constexpr):
    WARPS: tl.constexpr = GEMV.warps
    ROWS: tl.constexpr = 16 * GEMV.groups
    COLUMNS: tl.constexpr = GEMV.columns
    return tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)


@triton.jit
def first_tokens(
    activations, stride, BLOCKS: tl.constexpr, GEMV: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """The activations of the first chunk."""
    MASKED: tl.constexpr = BLOCKS // GEMV.splits < GEMV.vector * GEMV.warps
    return load_tokens(activations, stride, 0, MASKED, BLOCKS, GEMV, _reads_sums(FIRST, SECOND))


@triton.jit
def multiply_rows(
    matrices, tiles, tokens, activations, stride, first_row, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """(columns, rows) of each matrix, as `projections.project`; `tiles` are those of `load_rows` from block 0
    on, `tokens` those of `first_tokens`. Reads each row once, and 40 or 48 bytes of activations per block and token.
    """
    STEP: tl.constexpr = GEMV.vector * GEMV.warps
    END: tl.constexpr = BLOCKS // GEMV.splits
    MASKED: tl.constexpr = END % STEP > 0
    totals = (_zeros(GEMV),) if SECOND is None else (_zeros(GEMV), _zeros(GEMV))
    if END <= STEP * GEMV.chunks:
        for start in tl.static_range(STEP, END, STEP):
            following = _load_chunk(
                matrices, activations, stride, first_row, start, start + STEP > END, BLOCKS, GEMV, FIRST, SECOND
            )
            totals = with_chunk(totals, tiles, tokens, GEMV, FIRST, SECOND)
            tiles, tokens = following
    else:
        for start in tl.range(STEP, END, STEP, num_stages=1):
            if GEMV.ahead:
                following = _load_chunk(
                    matrices, activations, stride, first_row, start, MASKED, BLOCKS, GEMV, FIRST, SECOND
                )
                totals = with_chunk(totals, tiles, tokens, GEMV, FIRST, SECOND)
                tiles, tokens = following
            else:
                totals = with_chunk(totals, tiles, tokens, GEMV, FIRST, SECOND)
                tiles, tokens = _load_chunk(
                    matrices, activations, stride, first_row, start, MASKED, BLOCKS, GEMV, FIRST, SECOND
                )
    totals = with_chunk(totals, tiles, tokens, GEMV, FIRST, SECOND)
    first = tl.trans(tl.sum(totals[0], axis=0)) * _unit(FIRST)
    if SECOND is None:
        return (first,)
    else:
        return first, tl.trans(tl.sum(totals[1], axis=0)) * _unit(SECOND)
