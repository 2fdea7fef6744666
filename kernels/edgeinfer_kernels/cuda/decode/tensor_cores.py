"""Rows of a matrix times the activations of up to sixteen tokens, on tensor cores.

A program multiplies 16 to 64 rows. Its warps divide the blocks of a row between them, so each weight and each
activation is read once by a program; the sums of the warps are added at the end. Weights are converted to
float16 in registers, activations too, relative to the largest scale of a token within the blocks that a warp
processes at once, so that no value overflows.

A thread loads VECTOR adjacent blocks of a row. The columns of an operand are in an order in which these are
the elements that a tensor core expects from the thread: operands take no shared memory.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tile_decoding import decode_quad, half_factors
from edgeinfer_kernels.cuda.triton_ops.tiles import load_tile_at, masked_load
from edgeinfer_kernels.cuda.triton_ops.words import f16_twice, scaled_codes

MIN_SCALE = tl.constexpr(1e-30)
"""Activations whose scale is below it count as 0."""
SIGN_BITS = tl.constexpr(-0x7F7F7F80)


@triton.jit
def _eights(COUNT: tl.constexpr):
    """0…COUNT as (8, 1, COUNT/8, 1)."""
    return tl.arange(0, COUNT // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]


@triton.jit
def _blocks_at(start, GEMV: tl.constexpr):
    """The blocks of the warps from `start` on, (1, warps, 1, blocks)."""
    WARPS: tl.constexpr = GEMV.warps
    VECTOR: tl.constexpr = GEMV.vector
    OWN: tl.constexpr = 4 * VECTOR
    warp = tl.arange(0, WARPS)[None, :, None, None]
    blocks = start + warp * OWN + tl.arange(0, OWN)[None, None, None, :]
    return tl.max_contiguous(tl.multiple_of(blocks, [1, 1, 1, VECTOR]), [1, 1, 1, OWN])


@triton.jit
def _load(matrix, first_row, start, BLOCKS: tl.constexpr, GEMV: tl.constexpr, TILE: tl.constexpr):
    """A tile of the matrix, (8, warps, rows/8, blocks), from block `start` on."""
    blocks = _blocks_at(start, GEMV)
    VECTOR: tl.constexpr = GEMV.vector
    SUPER_BLOCKS: tl.constexpr = BLOCKS // 8
    RUN: tl.constexpr = SUPER_BLOCKS & -SUPER_BLOCKS
    OWN: tl.constexpr = 4 * VECTOR
    CONTIGUOUS: tl.constexpr = RUN if RUN < OWN else OWN
    super_blocks = tl.multiple_of(blocks % SUPER_BLOCKS, [1, 1, 1, VECTOR])
    super_blocks = tl.max_contiguous(super_blocks, [1, 1, 1, CONTIGUOUS])
    rows = first_row + _eights(16 * GEMV.groups)
    return load_tile_at(matrix, rows, blocks, super_blocks, BLOCKS, True, TILE)


@triton.jit
def load_wide_ahead(matrix, first_row, BLOCKS: tl.constexpr, GEMV: tl.constexpr, TILE: tl.constexpr):
    """The first tile, before a kernel waits for its producers."""
    return _load(matrix, first_row, tl.program_id(2), BLOCKS, GEMV, TILE)


@triton.jit
def _load_activations(activations, stride, start, BLOCKS: tl.constexpr, GEMV: tl.constexpr):
    """The int8 words of the tokens, (8, warps, columns/8, blocks) each, the two factors of blocks as in
    `half_factors`, relative to the largest, and that one, (warps, 1, columns) float32.
    """
    TOKENS: tl.constexpr = GEMV.tokens
    WARPS: tl.constexpr = GEMV.warps
    COLUMNS: tl.constexpr = GEMV.columns
    blocks, token = _blocks_at(start, GEMV), _eights(COLUMNS)
    inside = (blocks < BLOCKS) & (token < TOKENS)
    pointers = activations + token * stride + blocks
    words = ()
    for plane in tl.static_range(8):
        words = words + (masked_load(pointers + plane * BLOCKS, inside, True),)
    first = masked_load(pointers + 8 * BLOCKS, inside, True).to(tl.float32, bitcast=True)
    second = masked_load(pointers + 9 * BLOCKS, inside, True).to(tl.float32, bitcast=True)
    largest = tl.max(tl.maximum(first, second), axis=3)
    inverse = tl.where(largest > MIN_SCALE, 1.0 / largest, 0.0)[:, :, :, None]
    factors = f16_twice(first * inverse), f16_twice(second * inverse)
    return words, factors, tl.reshape(tl.permute(largest, (1, 2, 0)), (WARPS, 1, COLUMNS))


@triton.jit
def _operand(parts):
    """Four elements of each block, (8, warps, rows/8, blocks), as (warps, rows, 4·blocks)."""
    joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    WARPS: tl.constexpr = joined.shape[1]
    EIGHTS: tl.constexpr = joined.shape[2]
    OWN: tl.constexpr = joined.shape[3]
    joined = tl.reshape(joined, (8, WARPS, EIGHTS, 4, OWN // 4, 2, 2))
    return tl.reshape(tl.permute(joined, (1, 2, 0, 4, 3, 5, 6)), (WARPS, 8 * EIGHTS, 4 * OWN))


@triton.jit
def _weights_of(tile, factors, GROUP: tl.constexpr, TILE: tl.constexpr):
    return _operand(decode_quad(tile[0], factors[0] if GROUP < 4 else factors[1], GROUP, TILE))


@triton.jit
def _sums(ROWS: tl.constexpr, GEMV: tl.constexpr):
    WARPS: tl.constexpr = GEMV.warps
    COLUMNS: tl.constexpr = GEMV.columns
    return tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)


@triton.jit
def project_wide(
    matrix, ahead, activations, stride, first_row, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """(columns, rows): as `projections.project`. Reads each row once, and 48 bytes of activations per block
    and token.
    """
    ROWS: tl.constexpr = 16 * GEMV.groups
    STEP: tl.constexpr = 4 * GEMV.vector * GEMV.warps
    tile, total = ahead, _sums(ROWS, GEMV)
    for start in tl.range(0, BLOCKS, STEP, num_stages=1):
        words, scales, largest = _load_activations(activations, stride, start, BLOCKS, GEMV)
        following = _load(matrix, first_row, start + STEP, BLOCKS, GEMV, TILE)
        factors = half_factors(tile, 0, TILE), half_factors(tile, 1, TILE)
        part = _sums(ROWS, GEMV)
        for group in tl.static_range(8):
            codes = scaled_codes(words[group] ^ SIGN_BITS, scales[0] if group < 4 else scales[1], 128)
            right = tl.permute(_operand(codes), (0, 2, 1))
            part = tl.dot(_weights_of(tile, factors, group, TILE), right, part)
        total += part * largest
        tile = following
    return tl.trans(tl.sum(total, axis=0))


@triton.jit
def project_wide_pair(
    first, second, ahead, activations, stride, first_row, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """`project_wide` for the same rows of two matrices: activations are read and converted once for both."""
    FIRST: tl.constexpr = GATED.gate
    SECOND: tl.constexpr = GATED.up
    ROWS: tl.constexpr = 16 * GEMV.groups
    STEP: tl.constexpr = 4 * GEMV.vector * GEMV.warps
    tile, other = ahead
    total, other_total = _sums(ROWS, GEMV), _sums(ROWS, GEMV)
    for start in tl.range(0, BLOCKS, STEP, num_stages=1):
        words, scales, largest = _load_activations(activations, stride, start, BLOCKS, GEMV)
        following = _load(first, first_row, start + STEP, BLOCKS, GEMV, FIRST)
        other_following = _load(second, first_row, start + STEP, BLOCKS, GEMV, SECOND)
        factors = half_factors(tile, 0, FIRST), half_factors(tile, 1, FIRST)
        other_factors = half_factors(other, 0, SECOND), half_factors(other, 1, SECOND)
        part, other_part = _sums(ROWS, GEMV), _sums(ROWS, GEMV)
        for group in tl.static_range(8):
            codes = scaled_codes(words[group] ^ SIGN_BITS, scales[0] if group < 4 else scales[1], 128)
            right = tl.permute(_operand(codes), (0, 2, 1))
            part = tl.dot(_weights_of(tile, factors, group, FIRST), right, part)
            other_part = tl.dot(_weights_of(other, other_factors, group, SECOND), right, other_part)
        total += part * largest
        other_total += other_part * largest
        tile, other = following, other_following
    return tl.trans(tl.sum(total, axis=0)), tl.trans(tl.sum(other_total, axis=0))
