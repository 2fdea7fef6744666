"""Kernels of a decode step that stream weights: embedding, projections, gated halves, residuals, the head.

A program takes sixteen rows of a matrix and all tokens of the step, so that weights are read once. An RMS
norm costs no kernel of its own: the producer of x quantises x·gain and leaves Σ x² of its rows in `squares`
(tokens, programs); the consumer multiplies its sums by 1/√(mean x² + ε). Partial sums are added in a fixed
order, so a step gives the same bits every time.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.tiles import (
    decode_elements,
    project,
    project_pair,
    quantise,
    release_consumers,
    wait_for_producers,
)

ROWS = tl.constexpr(16)
"""Rows of a program: as many as one group of quantised activations holds."""

# how the activations of a projection were normalised
PLAIN = tl.constexpr(0)
"""Already, or not at all."""
ROOT_MEAN_SQUARE = tl.constexpr(1)
"""The consumer has to multiply by 1/√(mean x² + ε)."""

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
RELU = tl.constexpr(2)
RELU_SQUARED = tl.constexpr(3)


@triton.jit
def _inverse_norm(squares, token, COUNT: tl.constexpr, WIDTH: tl.constexpr, epsilon):
    """1/√(mean x² + ε) of a token, from `COUNT` partial sums of squares."""
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    index = tl.arange(0, PADDED)
    parts = tl.load(squares + token * COUNT + index, mask=index < COUNT, other=0.0)
    return tl.rsqrt(tl.sum(parts, axis=0) / WIDTH + epsilon)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU in its tanh form, ReLU, or ReLU squared."""
    if ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    else:
        positive = tl.maximum(x, 0.0)
        if ACTIVATION == RELU_SQUARED:
            return positive * positive
        else:
            return positive


@triton.jit
def embed_kernel(
    embedding,
    ids,
    x,
    gain,
    activations,
    squares,
    scale,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    GAIN: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x = embedding row · scale, its activations x·gain and squares; program (256 columns, token)."""
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    chunk, token = tl.program_id(0), tl.program_id(1)
    row = tl.load(ids + token)
    group = chunk * 16 + tl.arange(0, 16)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    value = decode_elements(embedding, row, tl.minimum(column, WIDTH - 1), IN_BLOCKS, TILE) * scale
    value = tl.where(inside, value, 0.0)
    tl.store(x + token * WIDTH + column, value, mask=inside)
    tl.store(squares + token * COUNT + group, tl.sum(value * value, axis=1), mask=group < COUNT)
    if GAIN:
        value *= tl.load(gain + column, mask=inside, other=0.0)
    quantise(value, activations + token * (PLANES * BLOCKS), group, group < 2 * BLOCKS, BLOCKS, PLANES)


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
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y (tokens, stride) = rows of two matrices times activations + bias; two, for formats may differ.

    Reads the rows' planes once, 4·PLANES·BLOCKS bytes a token; writes 64 bytes a token and program.
    """
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    if program < FIRST_PROGRAMS:
        rows = program * ROWS + lane
        sums = project(first, activations, PLANES * BLOCKS, rows, BLOCKS, STEP, TOKENS, FIRST, DEPENDENT)
    else:
        rows = (program - FIRST_PROGRAMS) * ROWS + lane
        sums = project(second, activations, PLANES * BLOCKS, rows, BLOCKS, STEP, TOKENS, SECOND, DEPENDENT)
    out = program * ROWS + lane
    for token in tl.static_range(TOKENS):
        value = sums[token]
        if NORM == ROOT_MEAN_SQUARE:
            value *= _inverse_norm(squares, token, COUNT, WIDTH, epsilon)
        if BIAS:
            value += tl.load(bias + out)
        tl.store(y + token * stride + out, value)


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
    """hidden = activation(gate·h) · (up·h), as activations; ungated: activation(up·h).

    Reads sixteen rows of both matrices once; writes 12 words for 32 hidden values and token.
    """
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    stride = PLANES * BLOCKS
    if GATED:
        gates, ups = project_pair(
            gate, up, activations, stride, rows, BLOCKS, STEP, TOKENS, GATE, UP, DEPENDENT
        )
    else:
        ups = project(up, activations, stride, rows, BLOCKS, STEP, TOKENS, UP, DEPENDENT)
        gates = ups
    group = program + tl.arange(0, 1)
    for token in tl.static_range(TOKENS):
        up_value, gate_value = ups[token], gates[token]
        if NORM == ROOT_MEAN_SQUARE:
            inverse = _inverse_norm(squares, token, COUNT, WIDTH, epsilon)
            up_value, gate_value = up_value * inverse, gate_value * inverse
        if BIAS:
            up_value += tl.load(up_bias + rows)
            gate_value += tl.load(gate_bias + rows)
        if GATED:
            value = activate(gate_value, ACTIVATION) * up_value
        else:
            value = activate(up_value, ACTIVATION)
        out = hidden + token * (HIDDEN_PLANES * HIDDEN_BLOCKS)
        quantise(tl.reshape(value, (1, 16)), out, group, group >= 0, HIDDEN_BLOCKS, HIDDEN_PLANES)


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
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x += scale·(rows times activations + bias); then x·gain as activations, and Σ x² of these rows."""
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < WIDTH
    sums = project(matrix, activations, PLANES * BLOCKS, rows, BLOCKS, STEP, TOKENS, TILE, DEPENDENT)
    group = program + tl.arange(0, 1)
    for token in tl.static_range(TOKENS):
        value = sums[token]
        if BIAS:
            value += tl.load(bias + rows, mask=inside, other=0.0)
        pointers = x + token * WIDTH + rows
        value = tl.load(pointers, mask=inside, other=0.0) + scale * value
        tl.store(pointers, value, mask=inside)
        tl.store(squares + token * tl.num_programs(0) + program, tl.sum(value * value, axis=0))
        if GAIN:
            value *= tl.load(gain + rows, mask=inside, other=0.0)
        target = out + token * (OUT_PLANES * OUT_BLOCKS)
        quantise(tl.reshape(value, (1, 16)), target, group, group >= 0, OUT_BLOCKS, OUT_PLANES)


@triton.jit
def _normalised(
    value, weight, bias, inside, column, epsilon, WIDTH: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr
):
    """A whole row's norm: (groups, 16) float32, rms or layer, times weight, plus bias."""
    if LAYER:
        mean = tl.sum(tl.sum(value, axis=1), axis=0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
    square = tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH
    value = value * tl.rsqrt(square + epsilon) * tl.load(weight + column, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0)
    return value


@triton.jit
def join_kernel(
    y,
    stride,
    x,
    scale,
    post_weight,
    post_epsilon,
    weight,
    bias,
    epsilon,
    out,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    ADDS: tl.constexpr,
    POST: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x += scale·post_norm(y) if ADDS, then norm(x) as activations; one program a token, a row at once.

    For the norms that can't be left to the next kernel: layer norms, and those behind a block. Without x
    (ADDS 0) it quantises y. GROUPS·16 columns cover the width.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    value = tl.load(y + token * stride + column, mask=inside, other=0.0)
    if POST:
        value = _normalised(value, post_weight, bias, inside, column, post_epsilon, WIDTH, LAYER, False)
    if ADDS:
        pointers = x + token * WIDTH + column
        value = tl.load(pointers, mask=inside, other=0.0) + scale * value
        tl.store(pointers, value, mask=inside)
    if NORM:
        value = _normalised(value, weight, bias, inside, column, epsilon, WIDTH, LAYER, BIAS)
    target = out + token * (PLANES * BLOCKS)
    quantise(value, target, group, group < 2 * BLOCKS, BLOCKS, PLANES)


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
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """logits (tokens, vocabulary), scaled and soft-capped, and the best of these sixteen with its id."""
    release_consumers(DEPENDENT)
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < VOCABULARY
    sums = project(matrix, activations, PLANES * BLOCKS, rows, BLOCKS, STEP, TOKENS, TILE, DEPENDENT)
    for token in tl.static_range(TOKENS):
        value = sums[token] * scale
        if NORM == ROOT_MEAN_SQUARE:
            value *= _inverse_norm(squares, token, COUNT, WIDTH, epsilon)
        if CAPPED:
            value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))
        tl.store(logits + token * VOCABULARY + rows, value, mask=inside)
        broken = tl.max((inside & ((value != value) | (value == float("inf")))).to(tl.int32), axis=0)
        value = tl.where(inside, value, float("-inf"))
        top, place = tl.max(value, axis=0, return_indices=True)
        top = tl.where(broken > 0, float("nan"), top)
        tl.store(best + token * tl.num_programs(0) + program, top)
        tl.store(best_ids + token * tl.num_programs(0) + program, program * ROWS + place)


@triton.jit
def embed_rows_kernel(
    embedding, ids, x, scale, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr
):
    """x (tokens, WIDTH) = embedding rows of `ids` · scale; program (256 columns, token)."""
    column = tl.program_id(0) * 256 + tl.arange(0, 256)
    token, inside = tl.program_id(1), column < WIDTH
    row = tl.load(ids + token)
    value = decode_elements(embedding, row, tl.minimum(column, WIDTH - 1), BLOCKS, TILE) * scale
    tl.store(x + token * WIDTH + column, value, mask=inside)


@triton.jit(do_not_specialize=["first_row", "rows"])
def dequantise_kernel(
    matrix, first_row, out, rows, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr
):
    """out (rows, COLUMNS) float16 = the matrix from `first_row` on; program (256 columns, 4 rows).

    Reads the rows' planes once, writes 2 bytes a weight.
    """
    column = tl.program_id(0) * 256 + tl.arange(0, 256)[None, :]
    row = tl.program_id(1) * 4 + tl.arange(0, 4)[:, None]
    inside = (column < COLUMNS) & (row < rows)
    value = decode_elements(
        matrix, first_row + tl.minimum(row, rows - 1), tl.minimum(column, COLUMNS - 1), BLOCKS, TILE
    )
    tl.store(out + row * COLUMNS + column, value.to(tl.float16), mask=inside)


@triton.jit
def _advance(state, chosen, next_id, RING: tl.constexpr):
    """Leave the id (-1: none) at its token's place in the ring, and make it the next step's token."""
    cached = tl.load(state + 24)
    tl.store(chosen + cached % RING, next_id)
    tl.store(state, tl.maximum(next_id, 0))
    tl.store(state + 8, cached + 1)
    tl.store(state + 24, cached + 1)


@triton.jit
def choose_best_kernel(
    best,
    best_ids,
    state,
    chosen,
    PROGRAMS: tl.constexpr,
    RING: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The id of the highest logit, the lowest id among equals, for a step of one token; -1 for no numbers.

    It goes to `chosen` (RING,) at the token's position, and into `state` as the next step's token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    PADDED: tl.constexpr = triton.next_power_of_2(PROGRAMS)
    index = tl.arange(0, PADDED)
    value = tl.load(best + index, mask=index < PROGRAMS, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0)
    top, place = tl.max(value, axis=0, return_indices=True)
    next_id = tl.where((broken > 0) | (top == float("-inf")), -1, tl.load(best_ids + place))
    _advance(state, chosen, next_id, RING)


@triton.jit
def advance_kernel(results, state, chosen, RING: tl.constexpr):
    """Take over what was drawn: `results` holds the id, or -1 where the host has to sample."""
    _advance(state, chosen, tl.load(results), RING)
