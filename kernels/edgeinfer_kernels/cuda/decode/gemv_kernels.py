"""GEMV kernels of a decode step: projections, gated feed-forward, residuals, the head.

A program computes sixteen rows of a matrix for all tokens of the step, so weights are read once. An RMS norm
needs no separate kernel. The producer of x quantizes x·gain and stores Σ x² of its rows in `squares` (tokens,
programs). The consumer multiplies its sums by 1/√(mean x² + ε). Partial sums are added in a fixed order, so a
step is bit-reproducible.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.projections import ROWS, load_ahead, load_pair_ahead, project, project_pair
from edgeinfer_kernels.cuda.triton_ops.activations import activate, activate_gated
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

# How the activations of a projection were normalized.
PLAIN = tl.constexpr(0)
"""Already normalized, or without a norm."""
ROOT_MEAN_SQUARE = tl.constexpr(1)
"""The consumer must multiply by 1/√(mean x² + ε)."""


@triton.jit
def inverse_norms(squares, epsilon, TOKENS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """1/√(mean x² + ε) of the tokens, (columns, 1), from `COUNT` partial sums of squares each."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(TOKENS)
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    token, index = tl.arange(0, COLUMNS)[:, None], tl.arange(0, PADDED)[None, :]
    inside = (token < TOKENS) & (index < COUNT)
    parts = tl.load(squares + token * COUNT + index, mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(parts, axis=1) / WIDTH + epsilon)[:, None]


@triton.jit
def _project_behind_producers(
    matrix,
    activations,
    row,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`project`; the first weights are loaded before the kernel waits for the producers of the
    activations.
    """
    ahead = load_ahead(matrix, row, BLOCKS, STEP, VECTOR, TOKENS, TILE)
    wait_for_producers(DEPENDENT)
    return project(matrix, ahead, activations, PLANES * BLOCKS, row, BLOCKS, STEP, VECTOR, TOKENS, TILE)


@triton.jit
def rows_kernel(
    first,
    second,
    activations,
    y,
    bias,
    squares,
    epsilon,
    stride,
    FIRST_PROGRAMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y (tokens, stride) = rows of two matrices times activations + bias; two, because formats may differ.

    Reads the rows' planes once, 4·PLANES·BLOCKS bytes per token; writes 64 bytes per token and program.
    """
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    if program < FIRST_PROGRAMS:
        row = program * ROWS
        value = _project_behind_producers(
            first, activations, row, BLOCKS, PLANES, STEP, VECTOR, TOKENS, FIRST, DEPENDENT
        )
    else:
        row = (program - FIRST_PROGRAMS) * ROWS
        value = _project_behind_producers(
            second, activations, row, BLOCKS, PLANES, STEP, VECTOR, TOKENS, SECOND, DEPENDENT
        )
    COLUMNS: tl.constexpr = value.shape[0]
    token = tl.arange(0, COLUMNS)[:, None]
    out = (program * ROWS + tl.arange(0, 16))[None, :]
    if NORM == ROOT_MEAN_SQUARE:
        value *= inverse_norms(squares, epsilon, TOKENS, COUNT, WIDTH)
    if BIAS:
        value += tl.load(bias + out)
    tl.store(y + token * stride + out, value, mask=token < TOKENS)


@triton.jit
def gated_kernel(
    gate,
    up,
    activations,
    hidden,
    gate_bias,
    up_bias,
    squares,
    epsilon,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    HIDDEN_BLOCKS: tl.constexpr,
    HIDDEN_PLANES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden = activation(gate·h) · (up·h), as activations; without a gate: activation(up·h).

    Reads sixteen rows of both matrices once; writes 12 words per 32 hidden values and token.
    """
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    row, words = program * ROWS, PLANES * BLOCKS
    if GATED:
        pair = load_pair_ahead(gate, up, row, BLOCKS, STEP, VECTOR, TOKENS, GATE, UP)
        wait_for_producers(DEPENDENT)
        gates, ups = project_pair(
            gate, up, pair, activations, words, row, BLOCKS, STEP, VECTOR, TOKENS, GATE, UP
        )
    else:
        ahead = load_ahead(up, row, BLOCKS, STEP, VECTOR, TOKENS, UP)
        wait_for_producers(DEPENDENT)
        ups = project(up, ahead, activations, words, row, BLOCKS, STEP, VECTOR, TOKENS, UP)
        gates = ups
    COLUMNS: tl.constexpr = ups.shape[0]
    if NORM == ROOT_MEAN_SQUARE:
        inverse = inverse_norms(squares, epsilon, TOKENS, COUNT, WIDTH)
        ups, gates = ups * inverse, gates * inverse
    if BIAS:
        rows = (row + tl.arange(0, 16))[None, :]
        ups += tl.load(up_bias + rows)
        gates += tl.load(gate_bias + rows)
    if GATED:
        value = activate_gated(gates, ups, ACTIVATION)
    else:
        value = activate(ups, ACTIVATION)
    token = tl.arange(0, COLUMNS)
    quantize(value, hidden, program + token * 0, token < TOKENS, HIDDEN_BLOCKS, HIDDEN_PLANES, token)


@triton.jit
def residual_kernel(
    matrix,
    activations,
    x,
    bias,
    scale,
    gain,
    out,
    squares,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    OUT_BLOCKS: tl.constexpr,
    OUT_PLANES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x += scale·(rows times activations + bias); then x·gain as activations, and Σ x² of these rows.

    Reads sixteen rows' planes once, 4·PLANES·BLOCKS bytes per token; reads and writes 64 bytes of x per
    token, and writes half a block of activations.
    """
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    COLUMNS: tl.constexpr = triton.next_power_of_2(TOKENS)
    token = tl.arange(0, COLUMNS)
    rows = (program * ROWS + tl.arange(0, 16))[None, :]
    inside = (rows < WIDTH) & (token < TOKENS)[:, None]
    pointers = x + token[:, None] * WIDTH + rows
    row, words = program * ROWS, PLANES * BLOCKS
    ahead = load_ahead(matrix, row, BLOCKS, STEP, VECTOR, TOKENS, TILE)
    wait_for_producers(DEPENDENT)
    before = tl.load(pointers, mask=inside, other=0.0)
    value = project(matrix, ahead, activations, words, row, BLOCKS, STEP, VECTOR, TOKENS, TILE)
    if BIAS:
        value += tl.load(bias + rows, mask=rows < WIDTH, other=0.0)
    value = tl.where(inside, before + scale * value, 0.0)
    # If there are more threads than elements, several threads hold the same element. All must read it before
    # one of them writes; otherwise the later ones read the updated value.
    tl.debug_barrier()
    tl.store(pointers, value, mask=inside)
    sums = tl.sum(value * value, axis=1)
    tl.store(squares + token * tl.num_programs(0) + program, sums, mask=token < TOKENS)
    if GAIN:
        value *= tl.load(gain + rows, mask=rows < WIDTH, other=0.0)
    quantize(value, out, program + token * 0, token < TOKENS, OUT_BLOCKS, OUT_PLANES, token)


@triton.jit
def head_kernel(
    matrix,
    activations,
    logits,
    best,
    best_ids,
    squares,
    epsilon,
    scale,
    cap,
    VOCABULARY: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """logits (tokens, vocabulary), scaled and soft-capped, and the largest of these sixteen with its id.

    Formula: c·tanh(scale·row·h / c). Reads sixteen rows' planes once, 4·PLANES·BLOCKS bytes per token; writes
    72 bytes per token.
    """
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    value = _project_behind_producers(
        matrix, activations, program * ROWS, BLOCKS, PLANES, STEP, VECTOR, TOKENS, TILE, DEPENDENT
    )
    COLUMNS: tl.constexpr = value.shape[0]
    token = tl.arange(0, COLUMNS)
    rows = (program * ROWS + tl.arange(0, 16))[None, :]
    value *= scale
    if NORM == ROOT_MEAN_SQUARE:
        value *= inverse_norms(squares, epsilon, TOKENS, COUNT, WIDTH)
    if CAPPED:
        value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))
    inside = (rows < VOCABULARY) & (token < TOKENS)[:, None]
    tl.store(logits + token[:, None] * VOCABULARY + rows, value, mask=inside)
    broken = tl.max((inside & ((value != value) | (value == float("inf")))).to(tl.int32), axis=1)
    value = tl.where(inside, value, float("-inf"))
    top, place = tl.max(value, axis=1, return_indices=True)
    top = tl.where(broken > 0, float("nan"), top)
    found = token * tl.num_programs(0) + program
    tl.store(best + found, top, mask=token < TOKENS)
    tl.store(best_ids + found, program * ROWS + place, mask=token < TOKENS)
