"""The kernels of Mamba-2, for decode steps and for chunks of a prompt.

The state S of a head is (STATE_SIZE, HEAD_DIM), sixteen columns after each other. Rows of the state hold x, B
and C before the convolution, then Δ; results of the convolution have the rows of the positions between the
source slot's and the step (`pending`) first, then those of the step.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid, softplus
from edgeinfer_kernels.cuda.triton_ops.recurrent_rows import (
    load_row,
    load_slot,
    matrix_offsets,
    step_pending,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers

CHUNK, PIECE = 32, 16
"""Positions that are evaluated together in a prompt, and rows of the state."""


@triton.jit
def mamba2_rows_kernel(
    inputs, scales, stride, bias, rows,
    NET: tl.constexpr, DT_AT: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The rows of the state of a step's tokens, from rows of the projections that begin with xBC; their dt
    begins at DT_AT.

    One program per token and BLOCK channels, and one more for Δ. Reads and writes 4 bytes per element.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = inputs + token * stride, rows + token * NET.row_width
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + token)
    if piece < tl.num_programs(1) - 1:
        offsets = piece * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < NET.channels
        tl.store(target + offsets, tl.load(source + offsets, mask=inside, other=0.0) * scale, mask=inside)
    else:
        head = tl.arange(0, NET.padded_heads)
        mask = head < NET.heads
        dt = tl.load(source + DT_AT + head, mask=mask, other=0.0) * scale
        delta = softplus(dt + tl.load(bias + head, mask=mask, other=0.0))
        tl.store(target + NET.dt_at + head, delta, mask=mask)


@triton.jit
def mamba2_convolution_kernel(
    rows, words, state, taps, bias, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, TAPS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(conv + bias) of BLOCK channels of one position; program (row, piece), pending rows first.

    Reads 4·TAPS bytes per element, writes 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    row = tl.program_id(0)
    pending = step_pending(words)
    if row < pending + step_tokens(words):
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < NET.channels
        total = tl.zeros((BLOCK,), tl.float32)
        if BIASED:
            total = tl.load(bias + offsets, mask=mask, other=0.0)
        for tap in tl.static_range(TAPS):
            token = row - pending + tap - (TAPS - 1)
            value = load_row(rows, state, words, token, offsets, mask, CONFIG)
            total += tl.load(taps + tap * NET.channels + offsets, mask=mask, other=0.0) * value
        tl.store(out + row.to(tl.int64) * NET.channels + offsets, total * sigmoid(total), mask=mask)


@triton.jit
def mamba2_step_kernel(
    rows, conv, words, state, a, d, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a decode step, position by position; program (head, COLUMNS columns of S).

    Reads and writes every element of S once; results to `out` (tokens, heads · HEAD_DIM).
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    head = tl.program_id(0)
    index = tl.arange(0, NET.states)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_index, is_column = index < NET.state_size, column < NET.head_dim
    mask = is_index[:, None] & is_column[None, :]
    offsets = NET.matrix_at + matrix_offsets(head, index, column, NET.state_size, NET.head_dim)
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    pending = step_pending(words)
    rate, skip = tl.load(a + head), tl.load(d + head)
    x_at = head * NET.head_dim + column
    b_at = NET.heads * NET.head_dim + head // (NET.heads // NET.groups) * NET.state_size + index
    for row in range(pending + step_tokens(words)):
        line = conv + row * NET.channels
        x = tl.load(line + x_at, mask=is_column, other=0.0)
        b = tl.load(line + b_at, mask=is_index, other=0.0)
        c = tl.load(line + NET.groups * NET.state_size + b_at, mask=is_index, other=0.0)
        dt_at = NET.dt_at + head + index * 0
        dt = tl.sum(load_row(rows, state, words, row - pending, dt_at, index == 0, CONFIG), axis=0)
        matrix = matrix * tl.exp(dt * rate) + b[:, None] * (dt * x)[None, :]
        if row >= pending:
            y = tl.sum(matrix * c[:, None], axis=0) + skip * x
            tl.store(out + (row - pending) * NET.heads * NET.head_dim + x_at, y, mask=is_column)
    tl.store(state.slots + step_target(words) * CONFIG.slot_width + offsets, matrix, mask=mask)


@triton.jit
def mamba2_chunk_kernel(
    rows, conv, words, state, a, d, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The recurrence of a chunk of a prompt, COUNT positions at a time with their cumulative decay; program
    (head, COLUMNS columns of S).

    With G = Σ Δ a: Y = tril(e^(Gi - Gj) C Bᵀ) (Δ x) + e^G C S + d x; S ← e^G S + (e^(G - Gj) B)ᵀ (Δ x). S is
    read and written once per COUNT positions, PIECE rows at a time: all of it would take too many registers.
    Results as `mamba2_step_kernel`.
    """
    head = tl.program_id(0)
    index = tl.arange(0, PIECE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, COUNT)
    is_column = column < NET.head_dim
    target = state.slots + step_target(words) * CONFIG.slot_width + NET.matrix_at
    for piece in range(0, NET.state_size, PIECE):
        mask = (piece + index < NET.state_size)[:, None] & is_column[None, :]
        offsets = matrix_offsets(head, piece + index, column, NET.state_size, NET.head_dim)
        value = load_slot(state, words, NET.matrix_at + offsets, mask, CONFIG)
        tl.store(target + offsets, value, mask=mask)
    pending = step_pending(words)
    total = pending + step_tokens(words)
    rate, skip = tl.load(a + head), tl.load(d + head)
    x_at = head * NET.head_dim + column
    b_at = NET.heads * NET.head_dim + head // (NET.heads // NET.groups) * NET.state_size + index
    for first in range(0, total, COUNT):
        tl.debug_barrier()
        row = first + number
        inside = row < total
        line = conv + row.to(tl.int64)[:, None] * NET.channels
        x = tl.load(line + x_at[None, :], mask=inside[:, None] & is_column[None, :], other=0.0)
        dt = load_row(rows, state, words, row - pending, NET.dt_at + head + number * 0, inside, CONFIG)
        decay = tl.cumsum(dt * rate, axis=0)
        end = tl.sum(dt * rate, axis=0)
        step = dt[:, None] * x
        cb = tl.zeros((COUNT, COUNT), tl.float32)
        y = tl.zeros((COUNT, COLUMNS), tl.float32)
        for piece in range(0, NET.state_size, PIECE):
            is_index = piece + index < NET.state_size
            at = line + (b_at + piece)[None, :]
            b = tl.load(at, mask=inside[:, None] & is_index[None, :], other=0.0)
            at += NET.groups * NET.state_size
            c = tl.load(at, mask=inside[:, None] & is_index[None, :], other=0.0)
            mask = is_index[:, None] & is_column[None, :]
            place = target + matrix_offsets(head, piece + index, column, NET.state_size, NET.head_dim)
            matrix = tl.load(place, mask=mask, other=0.0)
            cb = tl.dot(c, tl.trans(b), cb, input_precision="ieee")
            y = tl.dot(c, matrix, y, input_precision="ieee")
            rest = tl.trans(b * tl.exp(end - decay)[:, None])
            matrix = tl.dot(rest, step, tl.exp(end) * matrix, input_precision="ieee")
            tl.store(place, matrix, mask=mask)
        is_past = number[:, None] >= number[None, :]
        cb *= tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0))
        y = tl.exp(decay)[:, None] * y + skip * x
        y = tl.dot(tl.where(is_past, cb, 0.0), step, y, input_precision="ieee")
        at = out + (row - pending).to(tl.int64)[:, None] * (NET.heads * NET.head_dim) + x_at[None, :]
        tl.store(at, y, mask=(inside & (row >= pending))[:, None] & is_column[None, :])


@triton.jit
def _gated_group(values, z, scale, weight, epsilon, token, stride, group, NET: tl.constexpr):
    """norm(y · silu(z)) of one group of a token, and the offsets and mask of its elements in a row."""
    lane = tl.arange(0, NET.width)
    mask = lane < NET.group_width
    offsets = group * NET.group_width + lane
    gate = tl.load(z + token * stride + offsets, mask=mask, other=0.0) * scale
    value = tl.load(values + token * (NET.heads * NET.head_dim) + offsets, mask=mask, other=0.0)
    value = value * gate * sigmoid(gate)
    if NET.has_norm:
        square = tl.sum(value * value, axis=0) / NET.group_width
        value = value / tl.sqrt(square + epsilon) * tl.load(weight + offsets, mask=mask, other=0.0)
    return value, offsets, mask


@triton.jit
def mamba2_gate_step_kernel(
    values, z, stride, weight, epsilon, NET: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """values = norm(values · silu(z)) of a decode step, in place; program (token, group)."""
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value, offsets, mask = _gated_group(values, z, 1.0, weight, epsilon, token, stride, group, NET)
    tl.store(values + token * (NET.heads * NET.head_dim) + offsets, value, mask=mask)


@triton.jit
def mamba2_gate_chunk_kernel(values, z, scales, stride, weight, epsilon, out, row_scales, NET: tl.constexpr):
    """out = norm(values · silu(z)) / row scale of a chunk, float16; one program per token.

    Written with scale 1 first; a row that needs another scale is computed again.
    """
    WIDTH: tl.constexpr = NET.width
    token = tl.program_id(0).to(tl.int64)
    z_scale = tl.load(scales + token)
    to = out + token * (NET.heads * NET.head_dim)
    largest = tl.zeros((WIDTH,), tl.float32)
    for group in range(NET.groups):
        y, offsets, mask = _gated_group(values, z, z_scale, weight, epsilon, token, stride, group, NET)
        largest = tl.maximum(largest, tl.abs(y))
        tl.store(to + offsets, y.to(tl.float16), mask=mask)
    scale = row_scale(tl.max(largest, axis=0))
    tl.store(row_scales + token, scale)
    if scale > 1.0:
        for group in range(NET.groups):
            y, offsets, mask = _gated_group(values, z, z_scale, weight, epsilon, token, stride, group, NET)
            tl.store(to + offsets, (y / scale).to(tl.float16), mask=mask)
