"""Rows of a matrix times the activations of a step's tokens: sixteen, or more on tensor cores.

Results are (columns, rows) float32, a row per token: one for a single token, a power of two for several; rows
beyond the step's tokens are undefined.

With several tokens, without tensor cores, the cost is dominated by reading activations, which every thread
does for its rows: 48 bytes per block and token. So threads then have many rows and few blocks: a program has
one or two warps, and a thread has VECTOR adjacent blocks, ideally one.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.tensor_cores import load_wide_ahead, project_wide
from edgeinfer_kernels.cuda.triton_ops.tiles import blocks_at, dot_tile, load_activations, load_tile
from edgeinfer_kernels.cuda.triton_ops.words import NO_SCALE

ROWS = tl.constexpr(16)
"""Rows of a group of quantized activations: those of a program without tensor cores."""
AHEAD = tl.constexpr(2)
"""Up to this token count, a thread has registers to prefetch the next weights while it computes; above, other
programs hide the latency.
"""
UNROLLED = 8
"""Maximum number of tiles times tokens that have separate code, unless a tile config has a number for whole
rows: more take long to compile, and may spill. A loop over several tokens has half of that.
"""


@triton.constexpr_function
def _looped(blocks: int, step: int, tokens: int, unrolled: int) -> int:
    """Tiles of an iteration of a loop over all but the first; 0: no loop, every tile has separate code."""
    without_loop = max(UNROLLED // tokens - 1, unrolled if unrolled > 1 else 0)
    most = UNROLLED if tokens == 1 else max(1, UNROLLED // (2 * tokens))
    rest = (blocks - 1) // step
    return 0 if rest <= without_loop else -(-rest // -(-rest // most))


@triton.constexpr_function
def _is_exact(blocks: int, step: int, looped: int) -> bool:
    """Whether the tiles of a loop over all but the first end with the row."""
    return blocks % step == 0 and (blocks // step - 1) % looped == 0


@triton.jit
def load_ahead(
    matrix,
    first_row,
    BLOCKS: tl.constexpr,
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load the first tile of a program's rows, before a kernel waits for its producers."""
    rows = first_row + tl.arange(0, 16)
    STEP: tl.constexpr = GEMV.step
    VECTOR: tl.constexpr = GEMV.vector
    if GEMV.warps > 0:
        return load_wide_ahead(matrix, first_row, BLOCKS, GEMV, TILE)
    elif GEMV.is_unrolled:
        return _tile_from(matrix, rows, 0, BLOCKS // GEMV.splits < STEP, BLOCKS, GEMV, TILE)
    else:
        # A zero that is opaque to the compiler: with a constant it would lose the block layout of the
        # threads.
        END: tl.constexpr = BLOCKS // GEMV.splits
        blocks = blocks_at(tl.program_id(2), STEP, VECTOR)
        return load_tile(matrix, rows, blocks, BLOCKS, STEP > END, TILE, VECTOR, END=END)


@triton.jit
def _blocks_from(start, GEMV: tl.constexpr):
    """STEP blocks from `start` on, as an unrolled loop reads them."""
    STEP: tl.constexpr = GEMV.step
    if GEMV.tokens == 1:
        return start + tl.arange(0, STEP)
    else:
        return blocks_at(tl.program_id(2) + start, STEP, GEMV.vector)


@triton.jit
def _tile_from(
    matrix, rows, start, MASKED: tl.constexpr, BLOCKS: tl.constexpr, GEMV: tl.constexpr, TILE: tl.constexpr
):
    VECTOR: tl.constexpr = 0 if GEMV.tokens == 1 else GEMV.vector
    blocks, END = _blocks_from(start, GEMV), BLOCKS // GEMV.splits
    return load_tile(matrix, rows, blocks, BLOCKS, MASKED, TILE, VECTOR, END=END)


@triton.jit
def _project_unrolled(
    matrix,
    ahead,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
):
    """(columns, 16): processes STEP blocks of a row at a time, with code for each, or for some in a loop."""
    STEP: tl.constexpr = GEMV.step
    END: tl.constexpr = BLOCKS // GEMV.splits
    at = _blocks_from(0, GEMV)
    totals = _products(ahead, activations, stride, at, STEP > END, BLOCKS, GEMV, TILE)
    LOOPED: tl.constexpr = _looped(END, STEP, GEMV.tokens, GEMV.unrolled)
    if LOOPED == 0:
        for start in tl.static_range(STEP, END, STEP):
            totals = _with_tile(
                totals, matrix, activations, stride, rows, start, start + STEP > END, BLOCKS, GEMV, TILE
            )
    else:
        MASKED: tl.constexpr = not _is_exact(END, STEP, LOOPED)
        for begin in tl.range(STEP, END, STEP * LOOPED, num_stages=1):
            for index in tl.static_range(LOOPED):
                start = begin + index * STEP
                totals = _with_tile(
                    totals, matrix, activations, stride, rows, start, MASKED, BLOCKS, GEMV, TILE
                )
    return _tokens_by_rows(totals)


@triton.jit
def _with_tile(
    totals, matrix, activations, stride, rows, start, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
    GEMV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The totals plus the products of the tile from block `start` on."""
    tile = _tile_from(matrix, rows, start, MASKED, BLOCKS, GEMV, TILE)
    at = _blocks_from(start, GEMV)
    return _added(totals, _products(tile, activations, stride, at, MASKED, BLOCKS, GEMV, TILE))


@triton.jit
def _products(
    tile, activations, stride, at, MASKED: tl.constexpr, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The products of a tile of blocks with the activations of each token, a tuple of (16, STEP)."""
    products = ()
    TOKENS: tl.constexpr = GEMV.tokens
    for token in tl.static_range(TOKENS):
        part = load_activations(activations + token * stride, at, BLOCKS, MASKED, TILE, BLOCKS // GEMV.splits)
        products = products + (dot_tile(tile, part, TILE),)
    return products


@triton.jit
def _added(totals, products):
    sums = ()
    for index in tl.static_range(len(totals)):
        sums = sums + (totals[index] + products[index],)
    return sums


@triton.jit
def _project_several(
    matrix,
    ahead,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
):
    """(columns, 16): processes STEP blocks at a time for all tokens, two tokens at a time while the next are
    loaded.
    """
    STEP: tl.constexpr = GEMV.step
    VECTOR: tl.constexpr = GEMV.vector
    TOKENS: tl.constexpr = GEMV.tokens
    END: tl.constexpr = BLOCKS // GEMV.splits
    PARTLY: tl.constexpr = END % STEP > 0
    tile = ahead
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals = totals + (tl.zeros((16, STEP), tl.float32),)
    for start in tl.range(0, END, STEP, num_stages=1):
        at = blocks_at(start, STEP, VECTOR)
        following_at = blocks_at(start + STEP, STEP, VECTOR)
        following = tile
        if TOKENS <= AHEAD:
            following = load_tile(matrix, rows, following_at, BLOCKS, True, TILE, VECTOR, END=END)
        totals = _added(totals, _products(tile, activations, stride, at, PARTLY, BLOCKS, GEMV, TILE))
        if TOKENS > AHEAD:
            following = load_tile(matrix, rows, following_at, BLOCKS, True, TILE, VECTOR, END=END)
        tile = following
    return _tokens_by_rows(totals)


@triton.jit
def _tokens_by_rows(totals):
    """(columns, 16) from a tuple of (16, blocks), one per token."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(len(totals))
    if COLUMNS == 1:
        return tl.reshape(tl.sum(totals[0], axis=1), (1, 16))
    else:
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
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program's rows of the matrix times the activations of all tokens, `stride` words apart.

    `ahead` is the result of `load_ahead`. GEMV.step blocks of a row are summed at a time. The sums of a token
    have the same order for any batch of tokens if step and vector are the same.
    """
    rows = first_row + tl.arange(0, 16 * GEMV.groups)
    if GEMV.warps > 0:
        value = project_wide((matrix,), (ahead,), activations, stride, first_row, BLOCKS, GEMV, TILE, None)[0]
    elif GEMV.is_unrolled:
        value = _project_unrolled(matrix, ahead, activations, stride, rows, BLOCKS, GEMV, TILE)
    else:
        value = _project_several(matrix, ahead, activations, stride, rows, BLOCKS, GEMV, TILE)
    return _with_lora(value, matrix, rows, TILE)


@triton.jit
def _with_lora(value, matrix, rows, TILE: tl.constexpr):
    """The sums (columns, rows), with a LoRA adapter plus b·(a·x): matrix[3] is a·x (tokens, rank), matrix[4]
    is b (rows, rank).
    """
    RANK: tl.constexpr = TILE.rank
    if RANK > 0:
        COLUMNS: tl.constexpr = value.shape[0]
        token = tl.arange(0, COLUMNS)[:, None, None]
        for start in tl.static_range(0, RANK, 16):
            index = start + tl.arange(0, 16)[None, None, :]
            products = tl.load(matrix[3] + token * RANK + index)
            weights = tl.load(matrix[4] + rows[None, :, None] * RANK + index)
            value += tl.sum(products * weights, axis=2)
    return value


@triton.jit
def _same_kind(activations, blocks, part, BLOCKS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The activations in the form of the second matrix; `part` is the first's."""
    if (FIRST.scale == NO_SCALE) == (SECOND.scale == NO_SCALE):
        return part
    else:
        return load_activations(activations, blocks, BLOCKS, True, SECOND)


@triton.jit
def _project_pair_unrolled(
    first,
    second,
    ahead,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    GEMV: tl.constexpr,
    GATED: tl.constexpr,
):
    """`_project_unrolled` for the same rows of two matrices, which share the loaded activations."""
    STEP: tl.constexpr = GEMV.step
    totals, others = _pair_products(ahead, activations, stride, 0, STEP > BLOCKS, BLOCKS, GEMV, GATED)
    LOOPED: tl.constexpr = _looped(BLOCKS, STEP, GEMV.tokens, GEMV.unrolled)
    if LOOPED == 0:
        for start in tl.static_range(STEP, BLOCKS, STEP):
            totals, others = _with_tiles(
                totals, others, first, second, activations, stride, rows, start, start + STEP > BLOCKS,
                BLOCKS, GEMV, GATED,
            )  # fmt: skip
    else:
        MASKED: tl.constexpr = not _is_exact(BLOCKS, STEP, LOOPED)
        for begin in tl.range(STEP, BLOCKS, STEP * LOOPED, num_stages=1):
            for index in tl.static_range(LOOPED):
                start = begin + index * STEP
                totals, others = _with_tiles(
                    totals, others, first, second, activations, stride, rows, start, MASKED,
                    BLOCKS, GEMV, GATED,
                )  # fmt: skip
    return _tokens_by_rows(totals), _tokens_by_rows(others)


@triton.jit
def _with_tiles(
    totals, others, first, second, activations, stride, rows, start, MASKED: tl.constexpr,
    BLOCKS: tl.constexpr, GEMV: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """`_with_tile` for each matrix."""
    FIRST: tl.constexpr = GATED.gate
    SECOND: tl.constexpr = GATED.up
    tile = _tile_from(first, rows, start, MASKED, BLOCKS, GEMV, FIRST)
    other = _tile_from(second, rows, start, MASKED, BLOCKS, GEMV, SECOND)
    one, two = _pair_products((tile, other), activations, stride, start, MASKED, BLOCKS, GEMV, GATED)
    return _added(totals, one), _added(others, two)


@triton.jit
def _pair_products(
    tiles, activations, stride, start, MASKED: tl.constexpr, BLOCKS: tl.constexpr, GEMV: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """`_products` of a tile of each matrix."""
    FIRST: tl.constexpr = GATED.gate
    SECOND: tl.constexpr = GATED.up
    at = _blocks_from(start, GEMV)
    products, others = (), ()
    TOKENS: tl.constexpr = GEMV.tokens
    for token in tl.static_range(TOKENS):
        words = activations + token * stride
        part = load_activations(words, at, BLOCKS, MASKED, FIRST)
        products = products + (dot_tile(tiles[0], part, FIRST),)
        part = _same_kind(words, at, part, BLOCKS, FIRST, SECOND)
        others = others + (dot_tile(tiles[1], part, SECOND),)
    return products, others


@triton.jit
def load_pair_ahead(
    first,
    second,
    first_row,
    BLOCKS: tl.constexpr,
    GEMV: tl.constexpr,
    GATED: tl.constexpr,
):
    """`load_ahead` for `project_pair`; with several tokens, but not on tensor cores, the second matrix is
    loaded later.
    """
    FIRST: tl.constexpr = GATED.gate
    SECOND: tl.constexpr = GATED.up
    ahead = load_ahead(first, first_row, BLOCKS, GEMV, FIRST)
    if GEMV.is_unrolled or GEMV.warps > 0:
        return ahead, load_ahead(second, first_row, BLOCKS, GEMV, SECOND)
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
    GEMV: tl.constexpr,
    GATED: tl.constexpr,
):
    """`project` for the same rows of two matrices: both results; in sequence for several tokens without
    tensor cores, else together.
    """
    FIRST: tl.constexpr = GATED.gate
    SECOND: tl.constexpr = GATED.up
    rows = first_row + tl.arange(0, 16 * GEMV.groups)
    if GEMV.warps > 0:
        one, other = project_wide(
            (first, second), ahead, activations, stride, first_row, BLOCKS, GEMV, FIRST, SECOND
        )
        return _with_lora(one, first, rows, FIRST), _with_lora(other, second, rows, SECOND)
    elif GEMV.is_unrolled:
        one, other = _project_pair_unrolled(
            first, second, ahead, activations, stride, rows, BLOCKS, GEMV, GATED
        )
        return _with_lora(one, first, rows, FIRST), _with_lora(other, second, rows, SECOND)
    else:
        one = project(first, ahead[0], activations, stride, first_row, BLOCKS, GEMV, FIRST)
        following = load_ahead(second, first_row, BLOCKS, GEMV, SECOND)
        other = project(second, following, activations, stride, first_row, BLOCKS, GEMV, SECOND)
        return one, other
