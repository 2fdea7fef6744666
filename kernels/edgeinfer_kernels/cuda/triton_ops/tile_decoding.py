"""Dequantization of tiles of quantized rows, and of single weights."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.words import (
    BFLOAT16,
    BRAIN,
    BYTE,
    CODEBOOK,
    E4M3,
    FLOAT16,
    HALF,
    MINIMUM,
    NIBBLE,
    NIBBLE_1,
    NIBBLE_2,
    NO_SCALE,
    PAIR,
    SHORT,
    SIGNED,
    SINGLE,
    code_offset,
    code_value,
    f16_twice,
    half_of_e4m3,
    high_f16,
    look_up,
    low_f16,
    paired_codes,
    paired_nibbles,
    scaled_codes,
    twice,
    unsigned_quad,
)


@triton.jit
def _decode_float(words, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    if TILE.code == SINGLE:
        return words[ELEMENT].to(tl.float32, bitcast=True)
    elif TILE.code == BRAIN:
        if ELEMENT % 2 == 0:
            return (words[ELEMENT // 2] << 16).to(tl.float32, bitcast=True)
        else:
            return (words[ELEMENT // 2] & -65536).to(tl.float32, bitcast=True)
    elif ELEMENT % 2 == 0:
        return low_f16(words[ELEMENT // 2])
    else:
        return high_f16(words[ELEMENT // 2])


@triton.jit
def decode_tile(tile, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """Weight ELEMENT of every block of a tile, (rows, blocks) float32."""
    words, scale, factor = tile
    UPPER: tl.constexpr = ELEMENT // 16
    if TILE.scale == NO_SCALE:
        return _decode_float(words, ELEMENT, TILE)
    else:
        value = code_value(unsigned_quad(words, ELEMENT // 4, TILE), ELEMENT % 4, code_offset(TILE))
        if TILE.scale == FLOAT16:
            return low_f16(scale) * value
        elif TILE.scale == BFLOAT16:
            return (scale << 16).to(tl.float32, bitcast=True) * value
        elif TILE.scale == E4M3:
            return factor.to(tl.float32, bitcast=True) * (half_of_e4m3(scale, UPPER) * value)
        elif TILE.scale == PAIR:
            return low_f16(scale) * value + high_f16(scale)
        elif TILE.scale == SIGNED:
            step = ((scale << (24 - 8 * UPPER)) >> 24).to(tl.float32)
            return low_f16(factor) * TILE.unit * step * value
        elif TILE.scale == MINIMUM:
            lowest = high_f16(factor) * ((scale >> 8) & 255).to(tl.float32)
            return low_f16(factor) * (scale & 255).to(tl.float32) * value - lowest
        else:
            lowest = high_f16(factor) * ((scale >> (8 + 4 * UPPER)) & 15).to(tl.float32)
            return low_f16(factor) * ((scale >> (4 * UPPER)) & 15).to(tl.float32) * value - lowest


@triton.jit
def decode_rows(tile, TILE: tl.constexpr):
    """All weights of a tile in the column order of its rows, (rows, 32·blocks) float16."""
    parts = ()
    if TILE.scale == FLOAT16:
        # One rounding, as of the product in float32: a code is exact in float16.
        factor = twice(tile[1])
        for group in tl.static_range(8):
            codes = unsigned_quad(tile[0], group, TILE)
            parts = parts + scaled_codes(codes, factor, code_offset(TILE))
    else:
        for element in tl.static_range(32):
            parts = parts + (decode_tile(tile, element, TILE).to(tl.float16),)
    # Elements that are half the size apart become neighbors in the last step: bit by bit, from the highest.
    for bit in tl.static_range(5):
        joined = ()
        for index in tl.static_range(16 >> bit):
            joined = joined + (tl.join(parts[index], parts[index + (16 >> bit)]),)
        parts = joined
    ROWS: tl.constexpr = parts[0].shape[0]
    BLOCKS: tl.constexpr = parts[0].shape[1]
    return tl.reshape(parts[0], (ROWS, 32 * BLOCKS))


@triton.jit
def half_factors(tile, UPPER: tl.constexpr, TILE: tl.constexpr):
    """The factor of the codes of elements 16·UPPER… of every block, and what is added to the products of
    formats with minimums, as float16, twice in a word.
    """
    _, scale, factor = tile
    if TILE.scale == FLOAT16:
        return twice(scale), scale
    elif TILE.scale == BFLOAT16:
        return f16_twice((scale << 16).to(tl.float32, bitcast=True)), scale
    elif TILE.scale == E4M3:
        return f16_twice(factor.to(tl.float32, bitcast=True) * half_of_e4m3(scale, UPPER)), scale
    elif TILE.scale == PAIR:
        return twice(scale), twice(scale >> 16)
    elif TILE.scale == SIGNED:
        step = ((scale << (24 - 8 * UPPER)) >> 24).to(tl.float32)
        return f16_twice(low_f16(factor) * TILE.unit * step), scale
    elif TILE.scale == MINIMUM:
        lowest = high_f16(factor) * ((scale >> 8) & 255).to(tl.float32)
        return f16_twice(low_f16(factor) * (scale & 255).to(tl.float32)), f16_twice(-lowest)
    else:
        lowest = high_f16(factor) * ((scale >> (8 + 4 * UPPER)) & 15).to(tl.float32)
        step = ((scale >> (4 * UPPER)) & 15).to(tl.float32)
        return f16_twice(low_f16(factor) * step), f16_twice(-lowest)


@triton.jit
def decode_quad(words, factors, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Weights 4·GROUP… of every block, four tensors in float16; `factors` are those of their half."""
    summand = None
    if TILE.scale == PAIR or TILE.scale == MINIMUM or TILE.scale == SHORT:
        summand = factors[1]
    if TILE.code == NIBBLE:
        return paired_nibbles(words[GROUP % 4], factors[0], summand, GROUP // 4, code_offset(TILE))
    else:
        return paired_codes(unsigned_quad(words, GROUP, TILE), factors[0], summand, code_offset(TILE))


@triton.jit
def decode_elements(matrix, row, column, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The weights at `row`, `column` (tensors that broadcast), float32; one word is read for each."""
    block, element = column // 32, column % 32
    index = (block % 8) * (BLOCKS // 8) + block // 8
    upper, part, byte = element // 16, (element % 16) // 4, element % 4
    if TILE.code == SINGLE:
        word = tl.load(matrix[0] + row * (32 * BLOCKS) + element * BLOCKS + index)
        return word.to(tl.float32, bitcast=True)
    elif TILE.code == HALF or TILE.code == BRAIN:
        word = tl.load(matrix[0] + row * (16 * BLOCKS) + (element // 2) * BLOCKS + index)
        word = word >> (16 * (element % 2))
        if TILE.code == HALF:
            return low_f16(word)
        else:
            return (word << 16).to(tl.float32, bitcast=True)
    else:
        code = _decode_code(matrix, row, index, upper, part, byte, BLOCKS, TILE)
        return _scale_code(matrix, row, block, index, upper, code, BLOCKS, TILE)


@triton.jit
def _decode_code(matrix, row, index, upper, part, byte, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The code of an element minus its offset, int32."""
    if TILE.code == BYTE:
        word = tl.load(matrix[0] + row * (8 * BLOCKS) + (4 * upper + part) * BLOCKS + index)
        return (word << (24 - 8 * byte)) >> 24
    elif TILE.code == CODEBOOK:
        word = tl.load(matrix[0] + row * (4 * BLOCKS) + part * BLOCKS + index)
        levels = look_up((word >> (16 * upper)) & 0xFFFF, TILE.codebook)
        return (levels << (24 - 8 * byte)) >> 24
    elif TILE.code == NIBBLE_1:
        pointers = matrix[0] + row * (5 * BLOCKS) + index
        code = (tl.load(pointers + part * BLOCKS) >> (8 * byte + 4 * upper)) & 15
        high = (tl.load(pointers + 4 * BLOCKS) >> (8 * byte + 4 * upper + part)) & 1
        return (code | (high << 4)) - TILE.offset
    elif TILE.code == NIBBLE_2:
        pointers = matrix[0] + row * (6 * BLOCKS) + index
        code = (tl.load(pointers + part * BLOCKS) >> (8 * byte + 4 * upper)) & 15
        high = (tl.load(pointers + (4 + upper) * BLOCKS) >> (8 * byte + 2 * part)) & 3
        return (code | (high << 4)) - TILE.offset
    else:
        word = tl.load(matrix[0] + row * (4 * BLOCKS) + part * BLOCKS + index)
        return ((word >> (8 * byte + 4 * upper)) & 15) - TILE.offset


@triton.jit
def _scale_code(matrix, row, block, index, upper, code, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Convert a code to a weight."""
    SUPER_BLOCKS: tl.constexpr = BLOCKS // 8
    value = code.to(tl.float32)
    if TILE.scale == PAIR:
        scale = tl.load(matrix[1] + row * BLOCKS + index)
        return low_f16(scale) * value + high_f16(scale)
    else:
        scale = tl.load(matrix[1] + (row // 2) * BLOCKS + index) >> ((row & 1) * 16)
        if TILE.scale == FLOAT16:
            return low_f16(scale) * value
        elif TILE.scale == BFLOAT16:
            return (scale << 16).to(tl.float32, bitcast=True) * value
        elif TILE.scale == E4M3:
            factor = tl.load(matrix[2] + row).to(tl.float32, bitcast=True)
            return factor * (half_of_e4m3(scale, upper) * value)
        elif TILE.scale == SIGNED:
            factor = tl.load(matrix[2] + (row // 2) * SUPER_BLOCKS + block // 8) >> ((row & 1) * 16)
            step = (scale << (24 - 8 * upper)) >> 24
            return low_f16(factor) * TILE.unit * step.to(tl.float32) * value
        else:
            factor = tl.load(matrix[2] + row * SUPER_BLOCKS + block // 8)
            if TILE.scale == MINIMUM:
                step, minimum = scale & 255, (scale >> 8) & 255
            else:
                step, minimum = (scale >> (4 * upper)) & 15, (scale >> (8 + 4 * upper)) & 15
            lowest = high_f16(factor) * minimum.to(tl.float32)
            return low_f16(factor) * step.to(tl.float32) * value - lowest
