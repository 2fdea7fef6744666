"""GEMV kernels of a decode step: projections, gated feed-forward, residuals, the head.

A program computes sixteen rows of a matrix for all tokens of the step, on tensor cores several groups of
sixteen, so weights are read once. If a matrix that adds to x has few rows for the GPU, several programs may
share them: each sums a part of the columns, and the program that finishes last adds up the parts. An RMS norm
needs no separate kernel. The producer of x quantizes x·gain and stores Σ x² of its rows in `sum_squares`
(tokens, programs). The consumer multiplies its sums by 1/√(mean x² + ε). Partial sums are added in a fixed
order, so a step is bit-reproducible.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.projections import load_ahead, load_pair_ahead, project, project_pair
from edgeinfer_kernels.cuda.triton_ops.activations import activate, activate_gated
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

# How the activations of a projection were normalized.
PLAIN = tl.constexpr(0)
"""Already normalized, or without a norm."""
ROOT_MEAN_SQUARE = tl.constexpr(1)
"""The consumer must multiply by 1/√(mean x² + ε)."""


@triton.jit
def _results(program, GEMV: tl.constexpr, COLUMNS: tl.constexpr):
    """Of each group of sixteen results of a program: its token, and the index of the rows' group."""
    GROUPS: tl.constexpr = GEMV.groups
    if GROUPS == 1:
        token = tl.arange(0, COLUMNS)
        return token, program + token * 0
    else:
        index = tl.arange(0, COLUMNS * GROUPS)
        return index // GROUPS, program * GROUPS + index % GROUPS


@triton.jit
def _by_groups(value, GEMV: tl.constexpr):
    """Results (columns, rows) as (columns · groups, 16), as `_results` counts them."""
    if GEMV.groups == 1:
        return value
    else:
        return tl.reshape(value, (value.shape[0] * GEMV.groups, 16))


@triton.jit
def inverse_norms(sum_squares, TOKENS: tl.constexpr, SOURCE: tl.constexpr, COLUMNS: tl.constexpr):
    """1/√(mean x² + ε) of the tokens, (columns, 1), from partial sums of squares."""
    COUNT: tl.constexpr = SOURCE.programs
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    token, index = tl.arange(0, COLUMNS)[:, None], tl.arange(0, PADDED)[None, :]
    total = tl.sum(_sums_at(sum_squares, token, index, TOKENS, COUNT), axis=1)
    return tl.rsqrt(total / SOURCE.width + sum_squares.epsilon)[:, None]


@triton.jit
def spread_inverse_norms(sum_squares, TOKENS: tl.constexpr, SOURCE: tl.constexpr, COLUMNS: tl.constexpr):
    """As `inverse_norms`; the threads of a warp have different tokens if there are many, else each has many
    of the results that are multiplied by these. With few tokens that costs less than the registers.
    """
    if COLUMNS <= 4:
        return inverse_norms(sum_squares, TOKENS, SOURCE, COLUMNS)
    else:
        COUNT: tl.constexpr = SOURCE.programs
        INNER: tl.constexpr = 16 if COUNT > 8 else 8
        OUTER: tl.constexpr = triton.next_power_of_2(triton.cdiv(COUNT, INNER))
        token = tl.arange(0, COLUMNS)[None, :, None]
        index = tl.arange(0, OUTER)[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :]
        total = tl.sum(tl.sum(_sums_at(sum_squares, token, index, TOKENS, COUNT), axis=2), axis=0)
        return tl.rsqrt(total / SOURCE.width + sum_squares.epsilon)[:, None]


@triton.jit
def _sums_at(sum_squares, token, index, TOKENS: tl.constexpr, COUNT: tl.constexpr):
    inside = (token < TOKENS) & (index < COUNT)
    return tl.load(sum_squares.sums + token * COUNT + index, mask=inside, other=0.0)


@triton.jit
def _project_after_producers(
    matrix, activations, sum_squares, row, SOURCE: tl.constexpr, GEMV: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`project` of normalized activations; the first weights are loaded before the kernel waits for the
    producers of the activations.
    """
    BLOCKS: tl.constexpr = SOURCE.blocks
    ahead = load_ahead(matrix, row, BLOCKS, GEMV, TILE)
    wait_for_producers(DEPENDENT)
    # Programs on tensor cores are short: without this they would wait for the sums at their end.
    EARLY: tl.constexpr = SOURCE.norm == ROOT_MEAN_SQUARE and GEMV.warps > 0
    inverse = 1.0
    if EARLY:
        inverse = spread_inverse_norms(sum_squares, GEMV.tokens, SOURCE, GEMV.columns)
    value = project(matrix, ahead, activations, SOURCE.planes * BLOCKS, row, BLOCKS, GEMV, TILE)
    if SOURCE.norm == ROOT_MEAN_SQUARE and not EARLY:
        inverse = spread_inverse_norms(sum_squares, GEMV.tokens, SOURCE, value.shape[0])
    return value * inverse


@triton.jit
def rows_kernel(
    first,
    second,
    activations,
    y,
    bias,
    sum_squares,
    stride,
    FIRST_PROGRAMS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BIAS: tl.constexpr,
    SOURCE: tl.constexpr,
    GEMV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y (tokens, stride) = rows of one or two matrices times activations + bias; two, because formats may
    differ. SECOND: None if there is only the first.

    Reads the rows' planes once, and the activations per token; writes 64 bytes per token and sixteen rows.
    """
    TOKENS: tl.constexpr = GEMV.tokens
    ROWS: tl.constexpr = 16 * GEMV.groups
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    if SECOND is None:
        value = _project_after_producers(
            first, activations, sum_squares, program * ROWS, SOURCE, GEMV, FIRST, DEPENDENT
        )
    elif program < FIRST_PROGRAMS:
        row = program * ROWS
        value = _project_after_producers(first, activations, sum_squares, row, SOURCE, GEMV, FIRST, DEPENDENT)
    else:
        row = (program - FIRST_PROGRAMS) * ROWS
        value = _project_after_producers(
            second, activations, sum_squares, row, SOURCE, GEMV, SECOND, DEPENDENT
        )
    COLUMNS: tl.constexpr = value.shape[0]
    token = tl.arange(0, COLUMNS)[:, None]
    out = (program * ROWS + tl.arange(0, ROWS))[None, :]
    if BIAS:
        value += tl.load(bias + out)
    tl.store(y + token * stride + out, value, mask=token < TOKENS)


@triton.jit
def head_rows_kernel(
    matrix,
    activations,
    y,
    stride,
    HEAD_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    READ: tl.constexpr,
    OUT: tl.constexpr,
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """HEAD_ROWS rows of a matrix for each head, times this head's row of activations (tokens · HEADS).

    y: (tokens, stride) float32, or activations if OUT has blocks. Reads sixteen rows' planes once, and the
    activations per token.
    """
    release_consumers(DEPENDENT)
    TOKENS: tl.constexpr = GEMV.tokens
    BLOCKS: tl.constexpr = READ.blocks
    ROWS: tl.constexpr = 16 * GEMV.groups
    program = tl.program_id(0)
    row, words = program * ROWS, READ.planes * BLOCKS
    ahead = load_ahead(matrix, row, BLOCKS, GEMV, TILE)
    wait_for_producers(DEPENDENT)
    own = activations + row // HEAD_ROWS * words
    value = project(matrix, ahead, own, HEADS * words, row, BLOCKS, GEMV, TILE)
    COLUMNS: tl.constexpr = value.shape[0]
    if OUT.blocks > 0:
        owner, group = _results(program, GEMV, COLUMNS)
        quantize(_by_groups(value, GEMV), y, group, owner < TOKENS, OUT, owner)
    else:
        token = tl.arange(0, COLUMNS)
        at = y + token[:, None] * stride + (row + tl.arange(0, ROWS))[None, :]
        tl.store(at, value, mask=(token < TOKENS)[:, None])


@triton.jit
def gated_kernel(
    gate,
    up,
    activations,
    hidden,
    gate_bias,
    up_bias,
    sum_squares,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    SOURCE: tl.constexpr,
    GEMV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden = activation(gate·h) · (up·h), as activations; without a gate: activation(up·h).

    Reads sixteen rows of both matrices once; writes 12 words per 32 hidden values and token.
    """
    release_consumers(DEPENDENT)
    BLOCKS: tl.constexpr = SOURCE.blocks
    TOKENS: tl.constexpr = GEMV.tokens
    ROWS: tl.constexpr = 16 * GEMV.groups
    UP: tl.constexpr = GATED.up
    EARLY: tl.constexpr = SOURCE.norm == ROOT_MEAN_SQUARE and GEMV.warps > 0
    program = tl.program_id(0)
    row, words = program * ROWS, SOURCE.planes * BLOCKS
    if GATED.has_gate:
        pair = load_pair_ahead(gate, up, row, BLOCKS, GEMV, GATED)
        wait_for_producers(DEPENDENT)
        if EARLY:
            inverse = spread_inverse_norms(sum_squares, TOKENS, SOURCE, GEMV.columns)
        gates, ups = project_pair(gate, up, pair, activations, words, row, BLOCKS, GEMV, GATED)
    else:
        ahead = load_ahead(up, row, BLOCKS, GEMV, UP)
        wait_for_producers(DEPENDENT)
        if EARLY:
            inverse = spread_inverse_norms(sum_squares, TOKENS, SOURCE, GEMV.columns)
        ups = project(up, ahead, activations, words, row, BLOCKS, GEMV, UP)
        gates = ups
    COLUMNS: tl.constexpr = ups.shape[0]
    if SOURCE.norm == ROOT_MEAN_SQUARE:
        if not EARLY:
            inverse = spread_inverse_norms(sum_squares, TOKENS, SOURCE, COLUMNS)
        ups, gates = ups * inverse, gates * inverse
    if GATED.has_bias:
        rows = (row + tl.arange(0, ROWS))[None, :]
        ups += tl.load(up_bias + rows)
        gates += tl.load(gate_bias + rows)
    if GATED.has_gate:
        value = activate_gated(gates, ups, GATED.activation)
    else:
        value = activate(ups, GATED.activation)
    token, group = _results(program, GEMV, COLUMNS)
    quantize(_by_groups(value, GEMV), hidden, group, token < TOKENS, HIDDEN, token)


@triton.jit
def residual_kernel(
    matrix,
    activations,
    x,
    bias,
    scale,
    target,
    splits,
    WIDTH: tl.constexpr,
    READ: tl.constexpr,
    OUT: tl.constexpr,
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x += scale·(rows times activations + bias); then x·gain as activations, and Σ x² of these rows.

    Program (sixteen rows, part of the columns). Reads sixteen rows' planes once, and the activations per
    token; reads and writes 64 bytes of x per token, and writes half a block of activations. `splits`: where
    programs that share rows leave their sums.
    """
    release_consumers(DEPENDENT)
    BLOCKS: tl.constexpr = READ.blocks
    SPLITS: tl.constexpr = GEMV.splits
    program = tl.program_id(0)
    row, words = program * 16 * GEMV.groups, READ.planes * BLOCKS
    if SPLITS > 1:
        begin = tl.program_id(1) * (BLOCKS // SPLITS)
        matrix = (matrix[0] + begin, matrix[1] + begin) + matrix[2:]
        activations += begin
    ahead = load_ahead(matrix, row, BLOCKS, GEMV, TILE)
    wait_for_producers(DEPENDENT)
    token = tl.arange(0, GEMV.columns)
    rows = (row + tl.arange(0, 16 * GEMV.groups))[None, :]
    inside = (rows < WIDTH) & (token < GEMV.tokens)[:, None]
    before = tl.load(x + token[:, None] * WIDTH + rows, mask=inside, other=0.0)
    value = project(matrix, ahead, activations, words, row, BLOCKS, GEMV, TILE)
    if SPLITS == 1:
        _add_rows(before, value, x, bias, scale, target, WIDTH, OUT, GEMV, BIAS, GAIN)
    else:
        part = splits.parts + program * (SPLITS * GEMV.columns * 16) + _of_part(GEMV)
        tl.store(part + tl.program_id(1) * (GEMV.columns * 16), value)
        tl.debug_barrier()
        if tl.atomic_add(splits.arrived + program, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(splits.arrived + program, 0)
            value = tl.load(part)
            for split in tl.static_range(1, SPLITS):
                value += tl.load(part + split * (GEMV.columns * 16))
            _add_rows(before, value, x, bias, scale, target, WIDTH, OUT, GEMV, BIAS, GAIN)


@triton.jit
def _of_part(GEMV: tl.constexpr):
    """The offsets of a program's sums of a token and a row, (columns, 16), in those of a split."""
    return tl.arange(0, GEMV.columns)[:, None] * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def _add_rows(
    before, value, x, bias, scale, target, WIDTH: tl.constexpr, OUT: tl.constexpr, GEMV: tl.constexpr,
    BIAS: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """x, which was `before`, += scale·(value + bias) of a program's rows; and what follows from x."""
    COLUMNS: tl.constexpr = GEMV.columns
    ROWS: tl.constexpr = 16 * GEMV.groups
    token = tl.arange(0, COLUMNS)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :]
    inside = (rows < WIDTH) & (token < GEMV.tokens)[:, None]
    pointers = x + token[:, None] * WIDTH + rows
    if BIAS:
        value += tl.load(bias + rows, mask=rows < WIDTH, other=0.0)
    value = tl.where(inside, before + scale * value, 0.0)
    # If there are more threads than elements, several threads hold the same element. All must read it before
    # one of them writes; otherwise the later ones read the updated value.
    tl.debug_barrier()
    tl.store(pointers, value, mask=inside)
    close_rows(value, target.gain, target.words, target.sums, WIDTH, OUT, GEMV, GAIN)


@triton.jit
def close_rows(
    value, gain, out, sum_squares, WIDTH: tl.constexpr, OUT: tl.constexpr, GEMV: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """Store x·gain of a program as activations, and Σ x² of sixteen columns each; value: x."""
    TOKENS: tl.constexpr = GEMV.tokens
    ROWS: tl.constexpr = 16 * GEMV.groups
    COLUMNS: tl.constexpr = value.shape[0]
    program = tl.program_id(0)
    rows = (program * ROWS + tl.arange(0, ROWS))[None, :]
    owner, group = _results(program, GEMV, COLUMNS)
    sums = tl.sum(_by_groups(value * value, GEMV), axis=1)
    tl.store(sum_squares + owner * (tl.num_programs(0) * GEMV.groups) + group, sums, mask=owner < TOKENS)
    if GAIN:
        value *= tl.load(gain + rows, mask=rows < WIDTH, other=0.0)
    quantize(_by_groups(value, GEMV), out, group, owner < TOKENS, OUT, owner)


@triton.jit
def head_kernel(
    matrix,
    activations,
    logits,
    best,
    best_ids,
    bias,
    sum_squares,
    scale,
    cap,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    BIAS: tl.constexpr,
    SOURCE: tl.constexpr,
    GEMV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """logits (tokens, vocabulary), scaled and soft-capped, and the largest of sixteen with its id.

    Formula: c·tanh(scale·(row·h + bias) / c). Reads the rows' planes once, and the activations per token;
    writes 72 bytes per token and sixteen rows.
    """
    TOKENS: tl.constexpr = GEMV.tokens
    ROWS: tl.constexpr = 16 * GEMV.groups
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    value = _project_after_producers(
        matrix, activations, sum_squares, program * ROWS, SOURCE, GEMV, TILE, DEPENDENT
    )
    COLUMNS: tl.constexpr = value.shape[0]
    token = tl.arange(0, COLUMNS)
    rows = (program * ROWS + tl.arange(0, ROWS))[None, :]
    value *= scale
    if BIAS:
        value += scale * tl.load(bias + rows, mask=rows < VOCABULARY, other=0.0)
    if CAPPED:
        value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))
    inside = (rows < VOCABULARY) & (token < TOKENS)[:, None]
    tl.store(logits + token[:, None] * VOCABULARY + rows, value, mask=inside)
    broken = inside & ((value != value) | (value == float("inf")))
    value = tl.where(inside, value, float("-inf"))
    owner, group = _results(program, GEMV, COLUMNS)
    broken = tl.max(_by_groups(broken.to(tl.int32), GEMV), axis=1)
    top, top_index = tl.max(_by_groups(value, GEMV), axis=1, return_indices=True)
    top = tl.where(broken > 0, float("nan"), top)
    index = owner * (tl.num_programs(0) * GEMV.groups) + group
    tl.store(best + index, top, mask=owner < TOKENS)
    tl.store(best_ids + index, group * 16 + top_index, mask=owner < TOKENS)
