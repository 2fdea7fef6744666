"""Kernels that dequantize rows of weights to floats: embeddings of tokens, and whole matrices for matmul."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.projections import ROWS
from edgeinfer_kernels.cuda.triton_ops.step_words import POSITIONS_AT, step_start
from edgeinfer_kernels.cuda.triton_ops.tile_decoding import decode_elements, decode_rows
from edgeinfer_kernels.cuda.triton_ops.tiles import load_tile, quantize, release_consumers, wait_for_producers


@triton.jit
def embedded(embedding, row, column, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Elements of a row of the embedding, in float32, 0 from column WIDTH on; with a LoRA adapter plus b·a:
    embedding[3] is a (rank, WIDTH), embedding[4] is b (rows, rank).
    """
    inside = column < WIDTH
    value = decode_elements(embedding, row, tl.minimum(column, WIDTH - 1), BLOCKS, TILE)
    RANK: tl.constexpr = TILE.rank
    if RANK > 0:
        for index in range(RANK):
            factor = tl.load(embedding[4] + row.to(tl.int64) * RANK + index)
            value += factor * tl.load(embedding[3] + index * WIDTH + column, mask=inside, other=0.0)
    return tl.where(inside, value, 0.0)


@triton.jit
def embed_kernel(
    embedding,
    ids,
    x,
    gain,
    activations,
    sum_squares,
    scale,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    OUT: tl.constexpr,
    GAIN: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x = embedding row · scale, its activations x·gain and squares; program (256 columns, token).

    Reads a row's planes per token; writes WIDTH·4 bytes and 12 words (44 with floats) per 32 columns.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    chunk, token = tl.program_id(0), tl.program_id(1)
    row = tl.load(ids + token)
    group = chunk * 16 + tl.arange(0, 16)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    value = embedded(embedding, row, column, WIDTH, IN_BLOCKS, TILE) * scale
    tl.store(x + token * WIDTH + column, value, mask=inside)
    tl.store(sum_squares + token * COUNT + group, tl.sum(value * value, axis=1), mask=group < COUNT)
    if GAIN:
        value *= tl.load(gain + column, mask=inside, other=0.0)
    BLOCKS: tl.constexpr = OUT.blocks
    quantize(value, activations + token * (OUT.planes * BLOCKS), group, group < 2 * BLOCKS, OUT)


@triton.jit
def embed_rows_kernel(
    embedding, ids, x, scale, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr
):
    """x (tokens, WIDTH) = embedding rows of `ids` · scale; program (256 columns, token).

    Reads a row's planes per token, writes WIDTH·4 bytes.
    """
    column = tl.program_id(0) * 256 + tl.arange(0, 256)
    token, inside = tl.program_id(1), column < WIDTH
    row = tl.load(ids + token)
    value = embedded(embedding, row, column, WIDTH, BLOCKS, TILE) * scale
    tl.store(x + token * WIDTH + column, value, mask=inside)


@triton.jit(do_not_specialize=["first_row", "rows"])
def dequantize_kernel(
    matrix,
    first_row,
    out,
    rows,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
):
    """out (rows, COLUMNS) float16 = the matrix from `first_row` on; program (STEP blocks, 16 rows).

    Reads the rows' planes once, writes 2 bytes per weight.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    taken = first_row + tl.minimum(row, rows - 1)
    block = tl.program_id(0) * STEP + tl.arange(0, STEP)
    stored_block = (block % 8) * (BLOCKS // 8) + block // 8
    values = decode_rows(load_tile(matrix, taken, stored_block, BLOCKS, BLOCKS % STEP > 0, TILE), TILE)
    column = tl.program_id(0) * (32 * STEP) + tl.arange(0, 32 * STEP)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    tl.store(out + row[:, None] * COLUMNS + column[None, :], values, mask=inside)


@triton.jit
def add_position_rows_kernel(
    x, rows, words, WIDTH: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr,
    IN_STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x (tokens, WIDTH) += the rows of the tokens' positions: those of a step's `words`, or from a chunk's
    first one on. Reads WIDTH · 8 bytes per token and writes WIDTH · 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0)
    position = tl.load(words + POSITIONS_AT + token) if IN_STEP else step_start(words) + token
    position = tl.minimum(position, POSITIONS - 1).to(tl.int64)  # Padding may be after the last one.
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = x + token.to(tl.int64) * WIDTH + column
    value = tl.load(at, mask=inside, other=0.0)
    value += tl.load(rows + position * WIDTH + column, mask=inside, other=0.0)
    tl.store(at, value, mask=inside)
