"""Sixteen rows of a matrix times the activations of a step's tokens.

Results are (columns, 16) float32, a row for every token: one for a single token, eight for several and on
tensor cores, of which those beyond the step's tokens mean nothing.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.tiles import dot_tile, load_activations, load_tile, wait_for_producers
from edgeinfer_kernels.cuda.warp_tiles import (
    COLUMNS,
    project_on_tensor_cores,
    project_pair_on_tensor_cores,
)
from edgeinfer_kernels.cuda.words import NO_SCALE, SINGLE

ROWS = tl.constexpr(16)
"""Rows of a program: as many as one group of quantised activations holds."""


@triton.jit
def _project_one(
    matrix,
    activations,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """(1, 16): STEP blocks of a row at a time, behind each other, the first loaded before the wait."""
    blocks = tl.arange(0, STEP)
    tile = load_tile(matrix, rows, blocks, BLOCKS, STEP > BLOCKS, TILE)
    wait_for_producers(DEPENDENT)
    part = load_activations(activations, blocks, BLOCKS, STEP > BLOCKS, TILE)
    total = dot_tile(tile, part, TILE)
    for start in tl.static_range(STEP, BLOCKS, STEP):
        at = start + blocks
        tile = load_tile(matrix, rows, at, BLOCKS, start + STEP > BLOCKS, TILE)
        part = load_activations(activations, at, BLOCKS, start + STEP > BLOCKS, TILE)
        total += dot_tile(tile, part, TILE)
    return tl.reshape(tl.sum(total, axis=1), (1, 16))


@triton.jit
def _add_step(
    sums,
    matrix,
    activations,
    stride,
    rows,
    blocks,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tuple of `sums`, one vector for each token, with the dot products of some more blocks added."""
    tile = load_tile(matrix, rows, blocks, BLOCKS, MASKED, TILE)
    grown = ()
    for token in tl.static_range(len(sums)):
        part = load_activations(activations + token * stride, blocks, BLOCKS, MASKED, TILE)
        grown = grown + (sums[token] + tl.sum(dot_tile(tile, part, TILE), axis=1),)
    return grown


@triton.jit
def _project_several(
    matrix,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """(8, 16) without tensor cores: a loop over STEP blocks, and over the tokens for each."""
    blocks = tl.arange(0, STEP)
    wait_for_producers(DEPENDENT)
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (rows * 0.0,)
    for start in tl.range(0, BLOCKS, STEP, num_stages=1):
        at = start + blocks
        sums = _add_step(sums, matrix, activations, stride, rows, at, BLOCKS, BLOCKS % STEP > 0, TILE)
    column = tl.arange(0, COLUMNS)[:, None]
    result = tl.zeros((COLUMNS, 16), tl.float32)
    for token in tl.static_range(TOKENS):
        result = tl.where(column == token, sums[token][None, :], result)
    return result


@triton.jit
def project(
    matrix,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    TENSOR: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sixteen rows of the matrix times the activations of TOKENS tokens, `stride` words apart.

    STEP blocks of a row at a time; or, where TENSOR is the number of warps and not 0, on the tensor cores.
    The first weights are loaded before the producers of the activations are waited for.
    """
    rows = first_row + tl.arange(0, 16)
    if TENSOR > 0 and TILE.code != SINGLE:
        return project_on_tensor_cores(
            matrix, activations, stride, first_row, BLOCKS, TOKENS, TENSOR, TILE, DEPENDENT
        )
    elif TENSOR == 0 and TOKENS == 1:
        return _project_one(matrix, activations, rows, BLOCKS, STEP, TILE, DEPENDENT)
    else:
        return _project_several(matrix, activations, stride, rows, BLOCKS, STEP, TOKENS, TILE, DEPENDENT)


@triton.jit
def _same_kind(activations, blocks, part, BLOCKS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The activations as the second matrix wants them; `part` are the first's."""
    if (FIRST.scale == NO_SCALE) == (SECOND.scale == NO_SCALE):
        return part
    else:
        return load_activations(activations, blocks, BLOCKS, True, SECOND)


@triton.jit
def _project_pair_of_one(
    first,
    second,
    activations,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`_project_one` for the same rows of two matrices at once."""
    blocks = tl.arange(0, STEP)
    tile = load_tile(first, rows, blocks, BLOCKS, STEP > BLOCKS, FIRST)
    other = load_tile(second, rows, blocks, BLOCKS, STEP > BLOCKS, SECOND)
    wait_for_producers(DEPENDENT)
    part = load_activations(activations, blocks, BLOCKS, STEP > BLOCKS, FIRST)
    total = dot_tile(tile, part, FIRST)
    part = _same_kind(activations, blocks, part, BLOCKS, FIRST, SECOND)
    other_total = dot_tile(other, part, SECOND)
    for start in tl.static_range(STEP, BLOCKS, STEP):
        at = start + blocks
        tile = load_tile(first, rows, at, BLOCKS, start + STEP > BLOCKS, FIRST)
        other = load_tile(second, rows, at, BLOCKS, start + STEP > BLOCKS, SECOND)
        part = load_activations(activations, at, BLOCKS, start + STEP > BLOCKS, FIRST)
        total += dot_tile(tile, part, FIRST)
        part = _same_kind(activations, at, part, BLOCKS, FIRST, SECOND)
        other_total += dot_tile(other, part, SECOND)
    return (
        tl.reshape(tl.sum(total, axis=1), (1, 16)),
        tl.reshape(tl.sum(other_total, axis=1), (1, 16)),
    )


@triton.jit
def project_pair(
    first,
    second,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    TENSOR: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`project` for the same rows of two matrices at once: both results."""
    ALIKE: tl.constexpr = (FIRST.scale == NO_SCALE) == (SECOND.scale == NO_SCALE)
    if TENSOR > 0 and ALIKE and FIRST.code != SINGLE and SECOND.code != SINGLE:
        return project_pair_on_tensor_cores(
            first, second, activations, stride, first_row, BLOCKS, TOKENS, TENSOR, FIRST, SECOND, DEPENDENT
        )
    elif TENSOR == 0 and TOKENS == 1:
        rows = first_row + tl.arange(0, 16)
        return _project_pair_of_one(first, second, activations, rows, BLOCKS, STEP, FIRST, SECOND, DEPENDENT)
    else:
        one = project(first, activations, stride, first_row, BLOCKS, STEP, TOKENS, TENSOR, FIRST, DEPENDENT)
        other = project(second, activations, stride, first_row, BLOCKS, STEP, TOKENS, TENSOR, SECOND, False)
        return one, other
