"""Sixteen rows of a matrix times the activations of a step's tokens.

Results are (columns, 16) float32, a row for every token: one for a single token, a power of two for several,
of which those beyond the step's tokens mean nothing.

What costs time with several tokens is the reading of activations, by every thread for the rows that it has:
48 bytes a block and token. So threads have many rows and few blocks then: a program of one or two warps, and
VECTOR blocks side by side in a thread, one at best.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import blocks_at, dot_tile, load_activations, load_tile
from edgeinfer_kernels.cuda.triton_ops.words import NO_SCALE

ROWS = tl.constexpr(16)
"""Rows of a program: as many as one group of quantized activations holds."""
AHEAD = tl.constexpr(2)
"""Tokens up to which a thread has registers for the next weights while it works on these; beyond, other
programs work meanwhile.
"""


@triton.jit
def load_ahead(
    matrix,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first tile of sixteen rows: what a kernel loads before it waits for its producers."""
    rows = first_row + tl.arange(0, 16)
    if TOKENS == 1:
        return load_tile(matrix, rows, tl.arange(0, STEP), BLOCKS, STEP > BLOCKS, TILE)
    else:
        # a zero that the compiler doesn't see through: of a constant it forgets how threads take blocks
        blocks = blocks_at(tl.program_id(2), STEP, VECTOR)
        return load_tile(matrix, rows, blocks, BLOCKS, STEP > BLOCKS, TILE, VECTOR)


@triton.jit
def _project_one(
    matrix, ahead, activations, rows, BLOCKS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr
):
    """(1, 16): STEP blocks of a row at a time, behind each other."""
    blocks = tl.arange(0, STEP)
    part = load_activations(activations, blocks, BLOCKS, STEP > BLOCKS, TILE)
    total = dot_tile(ahead, part, TILE)
    for start in tl.static_range(STEP, BLOCKS, STEP):
        at = start + blocks
        tile = load_tile(matrix, rows, at, BLOCKS, start + STEP > BLOCKS, TILE)
        part = load_activations(activations, at, BLOCKS, start + STEP > BLOCKS, TILE)
        total += dot_tile(tile, part, TILE)
    return tl.reshape(tl.sum(total, axis=1), (1, 16))


@triton.jit
def _project_several(
    matrix,
    ahead,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """(columns, 16): STEP blocks at a time for all tokens; of two tokens while the next are on their way."""
    PARTLY: tl.constexpr = BLOCKS % STEP > 0
    tile = ahead
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals = totals + (tl.zeros((16, STEP), tl.float32),)
    for start in tl.range(0, BLOCKS, STEP, num_stages=1):
        at = blocks_at(start, STEP, VECTOR)
        following_at = blocks_at(start + STEP, STEP, VECTOR)
        following = tile
        if TOKENS <= AHEAD:
            following = load_tile(matrix, rows, following_at, BLOCKS, True, TILE, VECTOR)
        grown = ()
        for token in tl.static_range(TOKENS):
            part = load_activations(activations + token * stride, at, BLOCKS, PARTLY, TILE)
            grown = grown + (totals[token] + dot_tile(tile, part, TILE),)
        totals = grown
        if TOKENS > AHEAD:
            following = load_tile(matrix, rows, following_at, BLOCKS, True, TILE, VECTOR)
        tile = following
    return _tokens_by_rows(totals)


@triton.jit
def _tokens_by_rows(totals):
    """(columns, 16) of a tuple of (16, blocks), one for each token."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(len(totals))
    column = tl.arange(0, COLUMNS)[None, :]
    result = tl.zeros((16, COLUMNS), tl.float32)
    for token in tl.static_range(len(totals)):
        result = tl.where(column == token, tl.sum(totals[token], axis=1)[:, None], result)
    return tl.trans(result)


@triton.jit
def project(
    matrix,
    ahead,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sixteen rows of the matrix times the activations of TOKENS tokens, `stride` words apart.

    `ahead` is what `load_ahead` gave. STEP blocks of a row are summed up at a time; a token's sums have the
    same order beside any others as long as STEP and VECTOR are the same.
    """
    rows = first_row + tl.arange(0, 16)
    if TOKENS == 1:
        return _project_one(matrix, ahead, activations, rows, BLOCKS, STEP, TILE)
    else:
        return _project_several(matrix, ahead, activations, stride, rows, BLOCKS, STEP, VECTOR, TOKENS, TILE)


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
    ahead,
    other_ahead,
    activations,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """`_project_one` for the same rows of two matrices at once."""
    blocks = tl.arange(0, STEP)
    part = load_activations(activations, blocks, BLOCKS, STEP > BLOCKS, FIRST)
    total = dot_tile(ahead, part, FIRST)
    part = _same_kind(activations, blocks, part, BLOCKS, FIRST, SECOND)
    other_total = dot_tile(other_ahead, part, SECOND)
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
def load_pair_ahead(
    first,
    second,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """`load_ahead` for `project_pair`; of several tokens the second matrix follows when its turn comes."""
    ahead = load_ahead(first, first_row, BLOCKS, STEP, VECTOR, TOKENS, FIRST)
    if TOKENS == 1:
        return ahead, load_ahead(second, first_row, BLOCKS, STEP, VECTOR, TOKENS, SECOND)
    else:
        return ahead, ahead


@triton.jit
def project_pair(
    first,
    second,
    ahead,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """`project` for the same rows of two matrices: both results; one token's at once, several one by one."""
    if TOKENS == 1:
        rows = first_row + tl.arange(0, 16)
        return _project_pair_of_one(
            first, second, ahead[0], ahead[1], activations, rows, BLOCKS, STEP, FIRST, SECOND
        )
    else:
        one = project(first, ahead[0], activations, stride, first_row, BLOCKS, STEP, VECTOR, TOKENS, FIRST)
        following = load_ahead(second, first_row, BLOCKS, STEP, VECTOR, TOKENS, SECOND)
        other = project(
            second, following, activations, stride, first_row, BLOCKS, STEP, VECTOR, TOKENS, SECOND
        )
        return one, other
