"""Device functions for tiles of quantized rows: loads, dot products with quantized activations, and
quantization.

*Activations* of one token are planes of 32-bit words in the block order of `plane_formats`, (planes, blocks):
8 words of int8 (word j: elements 4j… of the block), 2 float32 scales (elements 0…15, 16…31), 2 int32 sums of
the int8 values; if a consumer has float weights, 32 planes of the float32 values follow.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from edgeinfer_kernels.cuda.compile_target import HAS_HIP
from edgeinfer_kernels.cuda.triton_ops.words import (
    BFLOAT16,
    BRAIN,
    BYTE,
    CODEBOOK,
    E4M3,
    FLOAT16,
    HALF,
    MINIMUM,
    NIBBLE_1,
    NIBBLE_2,
    NO_SCALE,
    PAIR,
    SHORT,
    SIGNED,
    SINGLE,
    dot_signed,
    dot_unsigned,
    half_of_e4m3,
    high_f16,
    low_f16,
    quad,
)

INTEGER_PLANES = tl.constexpr(12)
FLOAT_PLANES = tl.constexpr(44)
"""Planes of activations without and with the float values."""
COUNTED_FROM, ZERO_SUM = tl.constexpr(0 if HAS_HIP else 0x4B400000), tl.constexpr(1.5 * 2**23)
"""The bits of a float32, and its value: an integer added to the bits is added to the value. On NVIDIA's GPUs
a subtraction takes less time than a conversion.
"""


@triton.jit
def wait_for_producers(DEPENDENT: tl.constexpr):
    """Allow the next kernel to start, then wait until the results of the previous kernels can be read."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release_consumers(DEPENDENT: tl.constexpr):
    """Allow the next kernel of the stream to start loading data that does not depend on this one."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def masked_load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def blocks_at(start, STEP: tl.constexpr, VECTOR: tl.constexpr):
    """The blocks start… start + STEP, of which a thread loads VECTOR adjacent ones. `start` is a multiple of
    VECTOR.
    """
    return tl.max_contiguous(tl.multiple_of(start + tl.arange(0, STEP), VECTOR), STEP)


@triton.jit
def _super_blocks_at(blocks, SUPER_BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    """Offsets of the super-block scales of `blocks`; loaded by the threads that load the blocks (VECTOR 0:
    any).
    """
    indices = blocks % SUPER_BLOCKS
    if VECTOR > 0:
        RUN: tl.constexpr = SUPER_BLOCKS & -SUPER_BLOCKS
        STEP: tl.constexpr = blocks.shape[0]
        indices = tl.max_contiguous(tl.multiple_of(indices, VECTOR), RUN if RUN < STEP else STEP)
    return indices[None, :]


@triton.jit
def load_tile(
    matrix,
    rows,
    blocks,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr = 0,
    kept=None,
    END: tl.constexpr = 0,
):
    """Words, scale and super-block scale of `rows` and `blocks`; each (rows, blocks) int32, factors of rows
    (rows, 1).

    `rows` and `blocks` are index vectors; the matrix has BLOCKS blocks per row. MASKED: `blocks` may exceed
    that; VECTOR: `blocks` come from `blocks_at`. kept: None, or a mask of the rows that are read (MASKED).
    """
    SUPER_BLOCKS: tl.constexpr = BLOCKS // 8
    super_blocks = _super_blocks_at(blocks, SUPER_BLOCKS, VECTOR)
    return load_tile_at(matrix, rows[:, None], blocks[None, :], super_blocks, BLOCKS, MASKED, TILE, kept, END)


@triton.jit
def load_tile_at(
    matrix, row, block, super_block, BLOCKS: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
    kept=None, END: tl.constexpr = 0,
):  # fmt: skip
    """`load_tile` of indices that broadcast; `super_block`: the offsets of the super-block scales."""
    inside = block < (END if END > 0 else BLOCKS)
    if kept is not None:
        inside = inside & kept[:, None]
    if TILE.code == BYTE:
        PLANES: tl.constexpr = 8
    elif TILE.code == NIBBLE_1:
        PLANES: tl.constexpr = 5
    elif TILE.code == NIBBLE_2:
        PLANES: tl.constexpr = 6
    elif TILE.code == HALF or TILE.code == BRAIN:
        PLANES: tl.constexpr = 16
    elif TILE.code == SINGLE:
        PLANES: tl.constexpr = 32
    else:
        PLANES: tl.constexpr = 4
    pointers = matrix[0] + row * (PLANES * BLOCKS) + block
    words = ()
    for plane in tl.static_range(PLANES):
        words = words + (masked_load(pointers + plane * BLOCKS, inside, MASKED),)
    if TILE.scale == NO_SCALE:
        scale = words[0]
    elif TILE.scale == PAIR:
        scale = masked_load(matrix[1] + row * BLOCKS + block, inside, MASKED)
    else:
        scale = masked_load(matrix[1] + (row // 2) * BLOCKS + block, inside, MASKED) >> ((row & 1) * 16)
    SUPER_BLOCKS: tl.constexpr = BLOCKS // 8
    if TILE.scale == SIGNED:
        pair = masked_load(matrix[2] + (row // 2) * SUPER_BLOCKS + super_block, inside, MASKED)
        factor = pair >> ((row & 1) * 16)
    elif TILE.scale == MINIMUM or TILE.scale == SHORT:
        factor = masked_load(matrix[2] + row * SUPER_BLOCKS + super_block, inside, MASKED)
    elif TILE.scale == E4M3:
        factor = tl.load(matrix[2] + row)
    else:
        factor = scale
    return words, scale, factor


@triton.jit
def load_activations(
    activations, blocks, BLOCKS: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, END: tl.constexpr = 0
):
    """One token's activations of `blocks`, (1, blocks) each: int8 words, scales, sums; or 32 floats. END: as
    in `load_tile`.
    """
    inside = blocks < (END if END > 0 else BLOCKS)
    planes = ()
    if TILE.scale == NO_SCALE:
        for element in tl.static_range(32):
            pointers = activations + (INTEGER_PLANES + element) * BLOCKS + blocks
            value = masked_load(pointers, inside, MASKED).to(tl.float32, bitcast=True)
            planes = planes + (value[None, :],)
    else:
        for plane in tl.static_range(INTEGER_PLANES):
            value = masked_load(activations + plane * BLOCKS + blocks, inside, MASKED)
            if plane == 8 or plane == 9:
                value = value.to(tl.float32, bitcast=True)
            planes = planes + (value[None, :],)
    return planes


@triton.jit
def _float_dot(words, floats, TILE: tl.constexpr):
    total = tl.zeros(words[0].shape, tl.float32)
    if TILE.code == SINGLE:
        for element in tl.static_range(32):
            total += words[element].to(tl.float32, bitcast=True) * floats[element]
    elif TILE.code == BRAIN:
        for pair in tl.static_range(16):
            total += (words[pair] << 16).to(tl.float32, bitcast=True) * floats[2 * pair]
            total += (words[pair] & -65536).to(tl.float32, bitcast=True) * floats[2 * pair + 1]
    else:
        for pair in tl.static_range(16):
            total += low_f16(words[pair]) * floats[2 * pair] + high_f16(words[pair]) * floats[2 * pair + 1]
    return total


@triton.jit
def scaled_sum(first, second, scale, factor, scale0, scale1, sum0, sum1, TILE: tl.constexpr):
    """The float32 value of the sums of the first and the second 16 elements of blocks; all arguments have the
    same shape.

    Formula: Σ_h scale_h·a_h·sum_h - minimum_h·a_h·(Σ int8)_h, where sum_h (`first` and `second`) are the sums
    of codes (minus offset) times int8, a_h the activations' scales and (Σ int8)_h their sums.
    """
    if TILE.scale == SIGNED:
        first *= ((scale << 24) >> 24).to(tl.float32)
        second *= ((scale << 16) >> 24).to(tl.float32)
    elif TILE.scale == SHORT:
        first *= (scale & 15).to(tl.float32)
        second *= ((scale >> 4) & 15).to(tl.float32)
    elif TILE.scale == E4M3:
        scale0 = scale0 * half_of_e4m3(scale, 0)
        scale1 = scale1 * half_of_e4m3(scale, 1)
    both = first * scale0 + second * scale1
    if TILE.scale == E4M3:
        return factor.to(tl.float32, bitcast=True) * both
    elif TILE.scale == FLOAT16:
        return low_f16(scale) * both
    elif TILE.scale == BFLOAT16:
        return (scale << 16).to(tl.float32, bitcast=True) * both
    elif TILE.scale == SIGNED:
        return low_f16(factor) * TILE.unit * both
    else:
        sum0, sum1 = sum0.to(tl.float32), sum1.to(tl.float32)
        sums = sum0 * scale0 + sum1 * scale1
        if TILE.scale == PAIR:
            return low_f16(scale) * both + high_f16(scale) * sums
        elif TILE.scale == MINIMUM:
            minimum = high_f16(factor) * ((scale >> 8) & 255).to(tl.float32)
            return low_f16(factor) * (scale & 255).to(tl.float32) * both - minimum * sums
        else:
            minimum0 = ((scale >> 8) & 15).to(tl.float32) * sum0
            minimum1 = ((scale >> 12) & 15).to(tl.float32) * sum1
            sums = minimum0 * scale0 + minimum1 * scale1
            return low_f16(factor) * both - high_f16(factor) * sums


@triton.jit
def _float_of(sums):
    """The float32 value of sums that were counted from COUNTED_FROM; exact below 2²² (16·128·127 is less)."""
    if COUNTED_FROM == 0:
        return sums.to(tl.float32)
    else:
        return sums.to(tl.float32, bitcast=True) - ZERO_SUM


@triton.jit
def dot_tile(tile, activations, TILE: tl.constexpr):
    """Partial dot products (rows, blocks) float32 of a tile with one token's activations."""
    words, scale, factor = tile
    if TILE.scale == NO_SCALE:
        return _float_dot(words, activations, TILE)
    else:
        sum0, sum1 = activations[10], activations[11]
        first = tl.zeros_like(words[0]) + (COUNTED_FROM - TILE.offset * sum0)
        second = tl.zeros_like(words[0]) + (COUNTED_FROM - TILE.offset * sum1)
        for group in tl.static_range(4):
            if TILE.code == BYTE or TILE.code == CODEBOOK:
                first = dot_signed(quad(words, group, TILE), activations[group], first)
                second = dot_signed(quad(words, 4 + group, TILE), activations[4 + group], second)
            else:
                first = dot_unsigned(quad(words, group, TILE), activations[group], first)
                second = dot_unsigned(quad(words, 4 + group, TILE), activations[4 + group], second)
        first, second = _float_of(first), _float_of(second)
        return scaled_sum(first, second, scale, factor, activations[8], activations[9], sum0, sum1, TILE)


@triton.jit
def quantize(values, activations, group, inside, WORDS: tl.constexpr, token=0):
    """Store values (groups, 16) float32 as activations; `group` is the index of the sixteen elements in each
    row.

    `inside`: mask of the groups to store; `token`: the token index, one number or one per row. Writes 12
    words per 32 values, and the float values if WORDS has their planes.
    """
    BLOCKS: tl.constexpr = WORDS.blocks
    PLANES: tl.constexpr = WORDS.planes
    GROUPS: tl.constexpr = values.shape[0]
    block = group // 2
    half = group % 2
    index = token * (PLANES * BLOCKS) + (block % 8) * (BLOCKS // 8) + block // 8
    largest = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
    rounded = tl.floor(values * inverse[:, None] + 0.5).to(tl.int32)
    element = tl.arange(0, 16)[None, :]
    shifted = (rounded & 255) << (8 * (element % 4))
    words = tl.sum(tl.reshape(shifted, (GROUPS, 4, 4)), axis=2)
    word = tl.arange(0, 4)[None, :]
    pointers = activations + (half[:, None] * 4 + word) * BLOCKS + index[:, None]
    tl.store(pointers, words, mask=inside[:, None])
    scale = (largest / 127.0).to(tl.int32, bitcast=True)
    tl.store(activations + (8 + half) * BLOCKS + index, scale, mask=inside)
    tl.store(activations + (10 + half) * BLOCKS + index, tl.sum(rounded, axis=1), mask=inside)
    if PLANES == FLOAT_PLANES:
        plane = INTEGER_PLANES + half[:, None] * 16 + element
        pointers = activations + plane * BLOCKS + index[:, None]
        tl.store(pointers, values.to(tl.int32, bitcast=True), mask=inside[:, None])
