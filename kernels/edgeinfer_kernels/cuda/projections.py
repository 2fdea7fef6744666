"""Sixteen rows of a matrix times the activations of a step's tokens.

Results are (columns, 16) float32, a row for every token: one for a single token, eight for several, of which
those beyond the step's tokens mean nothing.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.tiles import dot_tile, load_activations, load_tile, wait_for_producers
from edgeinfer_kernels.cuda.words import NO_SCALE

COLUMNS = tl.constexpr(8)
"""Tokens of a step at most."""
ROWS = tl.constexpr(16)
"""Rows of a program: as many as one group of quantised activations holds."""
PAIRED = tl.constexpr(4)
"""Tokens up to which the sums of two matrices fit into registers together."""


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
def _add_tile(
    totals, tile, activations, stride, blocks, BLOCKS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr
):
    """The tuple of `totals`, one (16, STEP) for each token, with a tile's products added."""
    grown = ()
    for token in tl.static_range(len(totals)):
        part = load_activations(activations + token * stride, blocks, BLOCKS, BLOCKS % STEP > 0, TILE)
        grown = grown + (totals[token] + dot_tile(tile, part, TILE),)
    return grown


@triton.jit
def _zeros(STEP: tl.constexpr, TOKENS: tl.constexpr):
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals = totals + (tl.zeros((16, STEP), tl.float32),)
    return totals


@triton.jit
def _tokens_by_rows(totals):
    """(8, 16) of a tuple of (16, blocks), one for each token."""
    column = tl.arange(0, COLUMNS)[:, None]
    result = tl.zeros((COLUMNS, 16), tl.float32)
    for token in tl.static_range(len(totals)):
        result = tl.where(column == token, tl.sum(totals[token], axis=1)[None, :], result)
    return result


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
    """(8, 16): STEP blocks at a time for all tokens, while the next are on their way."""
    blocks = tl.arange(0, STEP)
    tile = load_tile(matrix, rows, blocks, BLOCKS, STEP > BLOCKS, TILE)
    wait_for_producers(DEPENDENT)
    totals = _zeros(STEP, TOKENS)
    for start in tl.range(0, BLOCKS, STEP, num_stages=1):
        at = start + blocks
        following = load_tile(matrix, rows, at + STEP, BLOCKS, True, TILE)
        totals = _add_tile(totals, tile, activations, stride, at, BLOCKS, STEP, TILE)
        tile = following
    return _tokens_by_rows(totals)


@triton.jit
def project(
    matrix,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sixteen rows of the matrix times the activations of TOKENS tokens, `stride` words apart.

    STEP blocks of a row at a time; the first weights are loaded before the producers of the activations are
    waited for. A row's sums have the same order for any number of tokens.
    """
    rows = first_row + tl.arange(0, 16)
    if TOKENS == 1:
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
def _project_pair_of_several(
    first,
    second,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`_project_several` for the same rows of two matrices at once."""
    blocks = tl.arange(0, STEP)
    tile = load_tile(first, rows, blocks, BLOCKS, STEP > BLOCKS, FIRST)
    other = load_tile(second, rows, blocks, BLOCKS, STEP > BLOCKS, SECOND)
    wait_for_producers(DEPENDENT)
    totals, others = _zeros(STEP, TOKENS), _zeros(STEP, TOKENS)
    for start in tl.range(0, BLOCKS, STEP, num_stages=1):
        at = start + blocks
        following = load_tile(first, rows, at + STEP, BLOCKS, True, FIRST)
        totals = _add_tile(totals, tile, activations, stride, at, BLOCKS, STEP, FIRST)
        tile = following
        following = load_tile(second, rows, at + STEP, BLOCKS, True, SECOND)
        others = _add_tile(others, other, activations, stride, at, BLOCKS, STEP, SECOND)
        other = following
    return _tokens_by_rows(totals), _tokens_by_rows(others)


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
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`project` for the same rows of two matrices at once: both results."""
    if TOKENS == 1:
        rows = first_row + tl.arange(0, 16)
        return _project_pair_of_one(first, second, activations, rows, BLOCKS, STEP, FIRST, SECOND, DEPENDENT)
    elif TOKENS <= PAIRED:
        rows = first_row + tl.arange(0, 16)
        return _project_pair_of_several(
            first, second, activations, stride, rows, BLOCKS, STEP, TOKENS, FIRST, SECOND, DEPENDENT
        )
    else:
        one = project(first, activations, stride, first_row, BLOCKS, STEP, TOKENS, FIRST, DEPENDENT)
        other = project(second, activations, stride, first_row, BLOCKS, STEP, TOKENS, SECOND, False)
        return one, other
