"""Kernels of a step that reads only the weights of active neurons: masked up, list, gathered down, sum.

    gate and up of active rows | list of active neurons | their columns of down | sum over the segments

Neurons are listed per segment of SEGMENT, each segment in ascending order, and partial sums are added in the
order of the segments: a step is bit-reproducible, and the host knows nothing of the counts. Down is stored by
neuron (`cpu/layout/neuron_layout.py`).
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cpu.runtime.abi import NEURONS_PER_BLOCK, OUTPUTS_PER_TILE
from edgeinfer_kernels.cuda.decode.gemv_kernels import ROOT_MEAN_SQUARE, close_rows, inverse_norms
from edgeinfer_kernels.cuda.decode.projections import load_ahead, project
from edgeinfer_kernels.cuda.triton_ops.activations import activate_gated
from edgeinfer_kernels.cuda.triton_ops.tiles import (
    dot_tile,
    load_activations,
    load_tile,
    quantize,
    release_consumers,
    wait_for_producers,
)
from edgeinfer_kernels.cuda.triton_ops.words import high_f16, low_f16

ROWS = tl.constexpr(16)
"""Rows of a program of gate and up, and outputs of one that adds the sums."""

NEURONS = tl.constexpr(NEURONS_PER_BLOCK)
TILE_OUTPUTS = tl.constexpr(OUTPUTS_PER_TILE)
GATHERED = tl.constexpr(16)
"""Neurons whose columns a program of down loads at a time."""


@triton.jit
def _project_kept(
    matrix, activations, stride, row, kept, BLOCKS: tl.constexpr, GEMV: tl.constexpr, TILE: tl.constexpr
):
    """As `project`, of the rows in `kept` (16,); the others aren't read, and their sums are 0."""
    STEP: tl.constexpr = GEMV.step
    TOKENS: tl.constexpr = GEMV.tokens
    COLUMNS: tl.constexpr = triton.next_power_of_2(TOKENS)
    rows, column = row + tl.arange(0, 16), tl.arange(0, COLUMNS)[:, None]
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals = totals + (tl.zeros((16, STEP), tl.float32),)
    for start in tl.static_range(0, BLOCKS, STEP):
        at = start + tl.arange(0, STEP)
        tile = load_tile(matrix, rows, at, BLOCKS, True, TILE, kept=kept)
        grown = ()
        for token in tl.static_range(TOKENS):
            part = load_activations(activations + token * stride, at, BLOCKS, start + STEP > BLOCKS, TILE)
            grown = grown + (totals[token] + dot_tile(tile, part, TILE),)
        totals = grown
    result = tl.zeros((COLUMNS, 16), tl.float32)
    for token in tl.static_range(TOKENS):
        result = tl.where(column == token, tl.sum(totals[token], axis=1)[None, :], result)
    return result


@triton.jit
def sparse_gated_kernel(
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
    """As `gated_kernel` with a gate, for ReLU families: up is read for the rows whose gate is above 0 for any
    token.

    Reads sixteen rows of gate once, and the active ones of up; writes 12 words per 32 values and token.
    """
    release_consumers(DEPENDENT)
    BLOCKS: tl.constexpr = SOURCE.blocks
    TOKENS: tl.constexpr = GEMV.tokens
    FIRST: tl.constexpr = GATED.gate
    SECOND: tl.constexpr = GATED.up
    program = tl.program_id(0)
    row, words = program * ROWS, SOURCE.planes * BLOCKS
    ahead = load_ahead(gate, row, BLOCKS, GEMV, FIRST)
    wait_for_producers(DEPENDENT)
    gates = project(gate, ahead, activations, words, row, BLOCKS, GEMV, FIRST)
    COLUMNS: tl.constexpr = gates.shape[0]
    token, rows = tl.arange(0, COLUMNS), (row + tl.arange(0, 16))[None, :]
    if SOURCE.norm == ROOT_MEAN_SQUARE:
        gates *= inverse_norms(sum_squares, TOKENS, SOURCE, COLUMNS)
    if GATED.has_bias:
        gates += tl.load(gate_bias + rows)
    gates = tl.where((token < TOKENS)[:, None], gates, 0.0)
    kept = tl.max(gates, axis=0) > 0
    ups = tl.zeros((COLUMNS, 16), tl.float32)
    if tl.max(kept.to(tl.int32), axis=0) > 0:
        ups = _project_kept(up, activations, words, row, kept, BLOCKS, GEMV, SECOND)
    if SOURCE.norm == ROOT_MEAN_SQUARE:
        ups *= inverse_norms(sum_squares, TOKENS, SOURCE, COLUMNS)
    if GATED.has_bias:
        ups += tl.load(up_bias + rows)
    value = activate_gated(gates, ups, GATED.activation)
    quantize(value, hidden, program + token * 0, token < TOKENS, HIDDEN, token)


@triton.jit
def list_active_kernel(
    hidden,
    neurons,
    counts,
    values,
    COUNT: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The neurons of a segment whose int8 activation isn't 0 for any token, ascending, and their activations.

    neurons (segments · SEGMENT,) int32; counts (segments,) int32; values (tokens, segments · SEGMENT) float32
    by position in the list. Program: segment. Reads 1.25 bytes of a neuron and token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    segment, size = tl.program_id(0), tl.num_programs(0) * SEGMENT
    neuron = segment * SEGMENT + tl.arange(0, SEGMENT)
    inside = neuron < COUNT
    block, within = neuron // NEURONS, neuron % NEURONS
    index = (block % 8) * (HIDDEN.blocks // 8) + block // 8
    active = tl.zeros((SEGMENT,), tl.int32)
    for token in tl.static_range(TOKENS):
        row = hidden + token * (HIDDEN.planes * HIDDEN.blocks) + index
        word = tl.load(row + (within // 4) * HIDDEN.blocks, mask=inside, other=0)
        active = active | ((word >> (8 * (within % 4))) & 255)
    listed = active != 0
    position = segment * SEGMENT + tl.cumsum(listed.to(tl.int32), axis=0) - 1
    tl.store(neurons + position, neuron, mask=listed)
    tl.store(counts + segment, tl.sum(listed.to(tl.int32), axis=0))
    for token in tl.static_range(TOKENS):
        row = hidden + token * (HIDDEN.planes * HIDDEN.blocks) + index
        word = tl.load(row + (within // 4) * HIDDEN.blocks, mask=listed, other=0)
        code = ((word >> (8 * (within % 4))) << 24) >> 24
        scale = tl.load(row + (8 + within // 16) * HIDDEN.blocks, mask=listed, other=0)
        value = code.to(tl.float32) * scale.to(tl.float32, bitcast=True)
        tl.store(values + token * size + position, value, mask=listed)


@triton.jit
def _word(at, mask):
    return tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def _scales(at, mask):
    """Four adjacent float16 of each address, float32."""
    low, high = _word(at, mask), _word(at + 4, mask)
    return low_f16(low), high_f16(low), low_f16(high), high_f16(high)


@triton.jit
def _byte(words, i):
    return ((words >> (8 * i)) & 255).to(tl.float32)


@triton.jit
def _four_weights(codes, whole, here, output, mask, nibble, OFFSETS: tl.constexpr, FORMAT: tl.constexpr):
    """The weights of four adjacent outputs from the bytes of their words, or one of the nibbles of these."""
    d = _scales(whole + 2 * output, mask)
    if FORMAT == "Q8_0":
        return (
            d[0] * ((codes << 24) >> 24).to(tl.float32),
            d[1] * ((codes << 16) >> 24).to(tl.float32),
            d[2] * ((codes << 8) >> 24).to(tl.float32),
            d[3] * (codes >> 24).to(tl.float32),
        )
    else:
        code = (codes >> (4 * nibble)) & 0x0F0F0F0F
        if FORMAT == "Q4_0":
            return (
                d[0] * (_byte(code, 0) - 8.0),
                d[1] * (_byte(code, 1) - 8.0),
                d[2] * (_byte(code, 2) - 8.0),
                d[3] * (_byte(code, 3) - 8.0),
            )
        else:
            minima = _scales(whole + 2 * (OFFSETS.outputs + output), mask)
            scale, minimum = _word(here + output, mask), _word(here + OFFSETS.outputs + output, mask)
            return (
                d[0] * _byte(scale, 0) * _byte(code, 0) - minima[0] * _byte(minimum, 0),
                d[1] * _byte(scale, 1) * _byte(code, 1) - minima[1] * _byte(minimum, 1),
                d[2] * _byte(scale, 2) * _byte(code, 2) - minima[2] * _byte(minimum, 2),
                d[3] * _byte(scale, 3) * _byte(code, 3) - minima[3] * _byte(minimum, 3),
            )


@triton.jit
def gathered_down_kernel(
    raw,
    neurons,
    counts,
    values,
    parts,
    OFFSETS: tl.constexpr,
    FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """parts (segments, tokens, outputs) float32 = Σ over the listed neurons of a segment of value · column.

    Program (TILE_OUTPUTS outputs, segment). Outputs 16k + 4l + i of 64 are byte i of word 4l + k; with four
    bits, high nibbles are the next 64. Reads bits/8 bytes per listed neuron and output, and the factors of
    their blocks.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    NIBBLES: tl.constexpr = 1 if FORMAT == "Q8_0" else 2
    WORDS: tl.constexpr = TILE_OUTPUTS // (4 * NIBBLES)
    tile, segment = tl.program_id(0), tl.program_id(1)
    size = tl.num_programs(1) * SEGMENT
    count = tl.load(counts + segment)
    word = tl.arange(0, WORDS)
    first = tile * TILE_OUTPUTS + 64 * (word // 16) + 16 * (word % 4) + 4 * (word % 16 // 4)
    sums = ()
    for _ in tl.static_range(TOKENS * NIBBLES * 4):
        sums = sums + (tl.zeros((GATHERED, WORDS), tl.float32),)
    for start in tl.range(0, count, GATHERED):
        position = start + tl.arange(0, GATHERED)
        at = segment * SEGMENT + position
        listed = position < count
        neuron = tl.load(neurons + at, mask=listed, other=0).to(tl.int64)
        block, mask = neuron // NEURONS, listed[:, None]
        whole = (raw + block // OFFSETS.blocks_per_super * OFFSETS.super_bytes)[:, None]
        inner = OFFSETS.super_factor_bytes + block % OFFSETS.blocks_per_super * OFFSETS.block_bytes
        here = whole + inner[:, None]
        column = here + (OFFSETS.factor_bytes + neuron % NEURONS * OFFSETS.neuron_bytes)[:, None]
        codes = _word(column + tile * (WORDS * 4) + (4 * word)[None, :], mask)
        weights = ()
        for nibble in tl.static_range(NIBBLES):
            output = (first + 64 * nibble)[None, :]
            weights = weights + _four_weights(codes, whole, here, output, mask, nibble, OFFSETS, FORMAT)
        grown = ()
        for token in tl.static_range(TOKENS):
            value = tl.load(values + token * size + at, mask=listed, other=0.0)[:, None]
            for part in tl.static_range(NIBBLES * 4):
                grown = grown + (sums[token * NIBBLES * 4 + part] + value * weights[part],)
        sums = grown
    for token in tl.static_range(TOKENS):
        to = parts + (segment * TOKENS + token) * OFFSETS.outputs
        for part in tl.static_range(NIBBLES * 4):
            output = first + 64 * (part // 4) + part % 4
            tl.store(to + output, tl.sum(sums[token * NIBBLES * 4 + part], axis=0))


@triton.jit
def _sum_of_parts(
    parts, bias, rows, segments, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, BIAS: tl.constexpr
):
    """(columns, 16): the sums of all segments, in order, plus the bias."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(TOKENS)
    token = tl.arange(0, COLUMNS)[:, None]
    inside = (token < TOKENS) & (rows < OUTPUTS)
    value = tl.zeros((COLUMNS, 16), tl.float32)
    for segment in tl.range(0, segments):
        value += tl.load(parts + (segment * TOKENS + token) * OUTPUTS + rows, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + rows, mask=rows < OUTPUTS, other=0.0)
    return value


@triton.jit
def sum_parts_kernel(
    parts,
    y,
    bias,
    segments,
    stride,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y (tokens, stride) = Σ over the segments + bias. Program: sixteen outputs."""
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, 16))[None, :]
    value = _sum_of_parts(parts, bias, rows, segments, OUTPUTS, TOKENS, BIAS)
    token = tl.arange(0, value.shape[0])[:, None]
    tl.store(y + token * stride + rows, value, mask=(token < TOKENS) & (rows < OUTPUTS))


@triton.jit
def add_parts_kernel(
    parts,
    x,
    bias,
    scale,
    gain,
    out,
    sum_squares,
    segments,
    OUTPUTS: tl.constexpr,
    OUT: tl.constexpr,
    GEMV: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x += scale·(Σ over the segments + bias); then x·gain as activations, and Σ x², as `residual_kernel`."""
    TOKENS: tl.constexpr = GEMV.tokens
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, 16))[None, :]
    value = _sum_of_parts(parts, bias, rows, segments, OUTPUTS, TOKENS, BIAS)
    token = tl.arange(0, value.shape[0])[:, None]
    inside = (token < TOKENS) & (rows < OUTPUTS)
    pointers = x + token * OUTPUTS + rows
    value = tl.where(inside, tl.load(pointers, mask=inside, other=0.0) + scale * value, 0.0)
    tl.debug_barrier()
    tl.store(pointers, value, mask=inside)
    close_rows(value, gain, out, sum_squares, OUTPUTS, OUT, GEMV, GAIN)
