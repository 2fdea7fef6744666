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
from edgeinfer_kernels.cuda.triton_ops.words import f16_twice, paired_codes

MIN_SCALE = tl.constexpr(1e-30)
"""Activations whose scale is below it count as 0."""
SIGN_BITS = tl.constexpr(-0x7F7F7F80)
MAX_CHUNKS = {8: 8, 16: 5}
"""Maximum number of chunks of blocks that have separate code, by columns: more take long to compile."""


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
    """The int8 words of the tokens and their two scales, (8, warps, columns/8, blocks) each."""
    TOKENS: tl.constexpr = GEMV.tokens
    blocks, token = _blocks_at(start, GEMV), _eights(GEMV.columns)
    inside = (blocks < BLOCKS) & (token < TOKENS)
    pointers = activations + token * stride + blocks
    planes = ()
    for plane in tl.static_range(10):
        planes = planes + (masked_load(pointers + plane * BLOCKS, inside, True),)
    return planes


@triton.jit
def _relative_scales(planes, GEMV: tl.constexpr):
    """The two factors of blocks of activations as in `half_factors`, relative to the largest, and that one,
    (warps, 1, columns) float32.
    """
    WARPS: tl.constexpr = GEMV.warps
    COLUMNS: tl.constexpr = GEMV.columns
    first, second = planes[8].to(tl.float32, bitcast=True), planes[9].to(tl.float32, bitcast=True)
    largest = tl.max(tl.maximum(first, second), axis=3)
    inverse = tl.where(largest > MIN_SCALE, 1.0 / largest, 0.0)[:, :, :, None]
    factors = f16_twice(first * inverse), f16_twice(second * inverse)
    return factors, tl.reshape(tl.permute(largest, (1, 2, 0)), (WARPS, 1, COLUMNS))


@triton.jit
def _operand(parts):
    """Four elements of each block, (8, warps, rows/8, blocks), as (warps, rows, 4·blocks), those that share
    registers next to each other.
    """
    joined = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
    WARPS: tl.constexpr = joined.shape[1]
    EIGHTS: tl.constexpr = joined.shape[2]
    OWN: tl.constexpr = joined.shape[3]
    joined = tl.reshape(joined, (8, WARPS, EIGHTS, 4, OWN // 4, 2, 2))
    return tl.reshape(tl.permute(joined, (1, 2, 0, 4, 3, 5, 6)), (WARPS, 8 * EIGHTS, 4 * OWN))


@triton.jit
def _weights_of(tile, factors, GROUP: tl.constexpr, TILE: tl.constexpr):
    return _operand(decode_quad(tile[0], factors, GROUP, TILE))


@triton.jit
def _sums(ROWS: tl.constexpr, GEMV: tl.constexpr):
    WARPS: tl.constexpr = GEMV.warps
    COLUMNS: tl.constexpr = GEMV.columns
    return tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)


@triton.constexpr_function
def _unrolled(blocks: int, step: int, most: int) -> int:
    """The chunks of `step` blocks that an iteration of a loop over all has code for, at most `most`."""
    count = -(-blocks // step)
    return -(-count // -(-count // most))


@triton.constexpr_function
def _max_chunks(columns: int, unrolled: int) -> int:
    return MAX_CHUNKS[columns] if unrolled else 1


@triton.jit
def _next_chunk(
    matrices, state, activations, stride, first_row, start, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The state with the products of the chunk at block `start`, and with what is read for the next. state:
    sums, tiles and activations.
    """
    STEP: tl.constexpr = 4 * GEMV.vector * GEMV.warps
    totals, tiles, planes = state
    if GEMV.unrolled:
        loaded = _load_chunk(
            matrices, activations, stride, first_row, start + STEP, BLOCKS, GEMV, FIRST, SECOND
        )
        return _with_products(totals, tiles, planes, GEMV, FIRST, SECOND), loaded[0], loaded[1]
    else:
        # The registers of this chunk can be used again, so more programs run at a time.
        totals = _with_products(totals, tiles, planes, GEMV, FIRST, SECOND)
        loaded = _load_chunk(
            matrices, activations, stride, first_row, start + STEP, BLOCKS, GEMV, FIRST, SECOND
        )
        return totals, loaded[0], loaded[1]


@triton.jit
def _load_chunk(
    matrices, activations, stride, first_row, start, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The tiles of the matrices and the activations from block `start` on."""
    tiles = (_load(matrices[0], first_row, start, BLOCKS, GEMV, FIRST),)
    if SECOND is not None:
        tiles = tiles + (_load(matrices[1], first_row, start, BLOCKS, GEMV, SECOND),)
    return tiles, _load_activations(activations, stride, start, BLOCKS, GEMV)


@triton.jit
def _with_products(totals, tiles, planes, GEMV: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The totals plus the products of a chunk; activations are converted once for both matrices."""
    ROWS: tl.constexpr = 16 * GEMV.groups
    scales, largest = _relative_scales(planes, GEMV)
    first, second = half_factors(tiles[0], 0, FIRST), half_factors(tiles[0], 1, FIRST)
    sums, other_sums = _sums(ROWS, GEMV), _sums(ROWS, GEMV)
    if SECOND is not None:
        other_first, other_second = half_factors(tiles[1], 0, SECOND), half_factors(tiles[1], 1, SECOND)
    for group in tl.static_range(8):
        codes = paired_codes(planes[group] ^ SIGN_BITS, scales[0] if group < 4 else scales[1], None, 128)
        right = tl.permute(_operand(codes), (0, 2, 1))
        sums = tl.dot(_weights_of(tiles[0], first if group < 4 else second, group, FIRST), right, sums)
        if SECOND is not None:
            factors = other_first if group < 4 else other_second
            other_sums = tl.dot(_weights_of(tiles[1], factors, group, SECOND), right, other_sums)
    if SECOND is None:
        return (totals[0] + sums * largest,)
    else:
        return totals[0] + sums * largest, totals[1] + other_sums * largest


@triton.jit
def project_wide(
    matrices, tiles, activations, stride, first_row, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """(columns, rows) of one or two matrices (SECOND: None if there is only one), as `projections.project`.
    Reads each row once, and 40 bytes of activations per block and token.
    """
    ROWS: tl.constexpr = 16 * GEMV.groups
    STEP: tl.constexpr = 4 * GEMV.vector * GEMV.warps
    CHUNKS: tl.constexpr = _unrolled(BLOCKS, STEP, _max_chunks(GEMV.columns, GEMV.unrolled))
    totals = (_sums(ROWS, GEMV),)
    if SECOND is not None:
        totals = totals + (_sums(ROWS, GEMV),)
    state = totals, tiles, _load_activations(activations, stride, 0, BLOCKS, GEMV)
    if CHUNKS * STEP >= BLOCKS:
        for index in tl.static_range(CHUNKS):
            start = index * STEP
            state = _next_chunk(
                matrices, state, activations, stride, first_row, start, BLOCKS, GEMV, FIRST, SECOND
            )
    else:
        for begin in tl.range(0, BLOCKS, CHUNKS * STEP, num_stages=1):
            for index in tl.static_range(CHUNKS):
                start = begin + index * STEP
                state = _next_chunk(
                    matrices, state, activations, stride, first_row, start, BLOCKS, GEMV, FIRST, SECOND
                )
    results = (tl.trans(tl.sum(state[0][0], axis=0)),)
    if SECOND is not None:
        results = results + (tl.trans(tl.sum(state[0][1], axis=0)),)
    return results
