"""The kernels of Mamba-2, for decode steps and for chunks of a prompt.

The state S of a head is (STATE_SIZE, HEAD_DIM), sixteen columns after each other. Rows of the state hold x, B
and C before the convolution, then Δ; results of the convolution have the rows of the positions between the
source slot's and the step (`pending`) first, then those of the step.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.compile_target import PRECISE
from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid, softplus
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import (
    earlier_token,
    is_on_path,
    load_row,
    load_slot,
    matrix_offsets,
)
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    own_row,
    own_words,
    step_pending,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


class Mamba2Config(NamedTuple):
    """The sizes of a Mamba-2 block. states, padded_heads, width: state_size, heads and group_width, powers of
    two; channels: elements of x, B and C. In a row of the state Δ begins at dt_at. matrix_at: where the
    matrix begins in a slot. has_norm: the groups are normalized; has_bias: the convolution has a bias.
    """

    heads: int
    head_dim: int
    state_size: int
    states: int
    groups: int
    channels: int
    row_width: int
    dt_at: int
    padded_heads: int
    group_width: int
    width: int
    matrix_at: int
    has_norm: bool
    taps: int
    has_bias: bool


@triton.jit
def mamba2_convolution_kernel(
    inputs, scales, stride, dt_bias, rows, words, state, taps, bias, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, DT_AT: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(conv + bias) of BLOCK channels of one position, pending ones first; and the rows of the state of a
    step's tokens, from rows of the projections that begin with xBC. Their dt begins at DT_AT.

    Program (position, piece), the last piece for Δ; in a batch (position, piece, sequence). Reads 8·taps
    bytes per element, writes 8.
    """
    TAPS: tl.constexpr = NET.taps
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words, inputs = own_words(words, CONFIG.is_batch), own_row(inputs, stride, CONFIG.is_batch)
    rows, out = own_row(rows, NET.row_width, CONFIG.is_batch), own_row(out, NET.channels, CONFIG.is_batch)
    row, piece = tl.program_id(0), tl.program_id(1)
    pending = step_pending(words)
    token = row - pending
    if row < pending + step_tokens(words):
        own = tl.maximum(token, 0).to(tl.int64)
        if piece < tl.num_programs(1) - 1:
            offsets = piece * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < NET.channels
            total = tl.zeros((BLOCK,), tl.float32)
            if NET.has_bias:
                total = tl.load(bias + offsets, mask=mask, other=0.0)
            value = tl.zeros((BLOCK,), tl.float32)
            for tap in tl.static_range(TAPS):
                other = earlier_token(words, token, TAPS - 1 - tap, CONFIG)
                at = tl.maximum(other, 0).to(tl.int64)
                value = tl.load(inputs + at * stride + offsets, mask=mask & (other >= 0), other=0.0)
                if SCALED:
                    value = value * tl.load(scales + at)
                value += load_row(
                    rows, state, words, tl.minimum(other, -1), offsets, mask & (other < 0), CONFIG
                )
                total += tl.load(taps + tap * NET.channels + offsets, mask=mask, other=0.0) * value
            tl.store(out + row.to(tl.int64) * NET.channels + offsets, total * sigmoid(total), mask=mask)
            tl.store(rows + own * NET.row_width + offsets, value, mask=mask & (token >= 0))
        else:
            head = tl.arange(0, NET.padded_heads)
            is_head = (head < NET.heads) & (token >= 0)
            dt = tl.load(inputs + own * stride + DT_AT + head, mask=is_head, other=0.0)
            if SCALED:
                dt = dt * tl.load(scales + own)
            delta = softplus(dt + tl.load(dt_bias + head, mask=is_head, other=0.0))
            tl.store(rows + own * NET.row_width + NET.dt_at + head, delta, mask=is_head)


@triton.jit
def mamba2_step_kernel(
    rows, conv, words, state, a, d, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a decode step, position by position; program (head, COLUMNS columns of S), in a batch
    (…, sequence), of a tree (…, token), as `delta_step_kernel`.

    Reads and writes every element of S once; results to `out` (tokens, heads · HEAD_DIM).
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words = own_words(words, CONFIG.is_batch)
    rows, conv = own_row(rows, NET.row_width, CONFIG.is_batch), own_row(conv, NET.channels, CONFIG.is_batch)
    out = own_row(out, NET.heads * NET.head_dim, CONFIG.is_batch)
    head = tl.program_id(0)
    index = tl.arange(0, NET.states)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_index, is_column = index < NET.state_size, column < NET.head_dim
    mask = is_index[:, None] & is_column[None, :]
    offsets = NET.matrix_at + matrix_offsets(head, index, column, NET.state_size, NET.head_dim)
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    pending, node = step_pending(words), tl.program_id(2)
    slot = state.slots + step_target(words) * CONFIG.slot_width + offsets
    rate, skip = tl.load(a + head), tl.load(d + head)
    x_at = head * NET.head_dim + column
    b_at = NET.heads * NET.head_dim + head // (NET.heads // NET.groups) * NET.state_size + index
    for row in range(pending + step_tokens(words)):
        if CONFIG.is_tree:
            tl.store(slot, matrix, mask=mask & (row == pending) & (node == 0) & (pending > 0))
        if is_on_path(words, node, row - pending, CONFIG):
            line = conv + row * NET.channels
            x = tl.load(line + x_at, mask=is_column, other=0.0)
            b = tl.load(line + b_at, mask=is_index, other=0.0)
            c = tl.load(line + NET.groups * NET.state_size + b_at, mask=is_index, other=0.0)
            dt_at = NET.dt_at + head + index * 0
            dt = tl.sum(load_row(rows, state, words, row - pending, dt_at, index == 0, CONFIG), axis=0)
            matrix = matrix * tl.exp(dt * rate) + b[:, None] * (dt * x)[None, :]
            is_result = row >= pending
            if CONFIG.is_tree:
                is_result = row == pending + node
            if is_result:
                y = tl.sum(matrix * c[:, None], axis=0) + skip * x
                tl.store(out + (row - pending) * NET.heads * NET.head_dim + x_at, y, mask=is_column)
    if not CONFIG.is_tree:
        tl.store(slot, matrix, mask=mask)


@triton.jit
def _chunk(
    rows, conv, words, state, a, head, column, chunk,
    NET: tl.constexpr, CONFIG: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Of the COUNT positions of a chunk: their tokens, whether each is there, the rows of the convolution, Δ,
    the cumulative decay Σ Δ a, its end, and x.
    """
    number = chunk * COUNT + tl.arange(0, COUNT)
    pending = step_pending(words)
    inside = number < pending + step_tokens(words)
    at = NET.dt_at + head + number * 0
    dt = load_row(rows, state, words, number - pending, at, inside, CONFIG)
    rates = dt * tl.load(a + head)
    line = conv + number.to(tl.int64)[:, None] * NET.channels
    mask = inside[:, None] & (column < NET.head_dim)[None, :]
    x = tl.load(line + (head * NET.head_dim + column)[None, :], mask=mask, other=0.0)
    return number - pending, inside, line, dt, tl.cumsum(rates, axis=0), tl.sum(rates, axis=0), x


@triton.jit
def _group_at(head, index, NET: tl.constexpr):
    """Where the elements `index` of B begin in a row of the convolution, for a head."""
    return NET.heads * NET.head_dim + head // (NET.heads // NET.groups) * NET.state_size + index


@triton.jit
def mamba2_states_kernel(
    rows, conv, words, state, a, states,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The state before each COUNT positions of a prompt, to `states` (chunk, head, matrix), and the last one
    to the target slot: S ← e^G S + Σ e^(G - Gj) Bⱼ (Δ x)ⱼᵀ with G = Σ Δ a over a chunk.

    Program (COLUMNS columns of a head's S, PIECE rows of it). Reads S once, x and B once per program.
    """
    PARTS: tl.constexpr = (NET.head_dim + COLUMNS - 1) // COLUMNS
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_index = index < NET.state_size
    mask = is_index[:, None] & (column < NET.head_dim)[None, :]
    offsets = matrix_offsets(head, index, column, NET.state_size, NET.head_dim)
    matrix = load_slot(state, words, NET.matrix_at + offsets, mask, CONFIG)
    size = tl.cast(NET.heads * NET.head_dim * NET.state_size, tl.int64)
    for chunk in range((step_pending(words) + step_tokens(words) + COUNT - 1) // COUNT):
        _, inside, line, dt, decay, end, x = _chunk(
            rows, conv, words, state, a, head, column, chunk, NET, CONFIG, COUNT
        )
        tl.store(states + chunk * size + offsets, matrix, mask=mask)
        at = line + _group_at(head, index, NET)[None, :]
        b = tl.load(at, mask=inside[:, None] & is_index[None, :], other=0.0) * tl.exp(end - decay)[:, None]
        matrix = tl.dot(tl.trans(b), dt[:, None] * x, tl.exp(end) * matrix, input_precision=PRECISE)
    target = state.slots + step_target(words) * CONFIG.slot_width + NET.matrix_at
    tl.store(target + offsets, matrix, mask=mask)


@triton.jit
def mamba2_chunk_kernel(
    rows, conv, words, state, a, d, states, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The results of COUNT positions of a prompt from the state before them, by their cumulative decay:
    Y = tril(e^(Gi - Gj) C Bᵀ) (Δ x) + e^G C S + d x; program (COLUMNS columns of a head's S, chunk).

    Reads x, B, C and S once, PIECE rows of S at a time; results as `mamba2_step_kernel`.
    """
    PARTS: tl.constexpr = (NET.head_dim + COLUMNS - 1) // COLUMNS
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if tl.program_id(1) * COUNT < step_pending(words) + step_tokens(words):
        column, index = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PIECE)
        is_column, number = column < NET.head_dim, tl.arange(0, COUNT)
        token, inside, line, dt, decay, _, x = _chunk(
            rows, conv, words, state, a, head, column, tl.program_id(1), NET, CONFIG, COUNT
        )
        before = states + tl.program_id(1).to(tl.int64) * (NET.heads * NET.head_dim * NET.state_size)
        cb = tl.zeros((COUNT, COUNT), tl.float32)
        y = tl.zeros((COUNT, COLUMNS), tl.float32)
        for piece in range(0, NET.state_size, PIECE):
            is_index = piece + index < NET.state_size
            at = line + _group_at(head, piece + index, NET)[None, :]
            mask = inside[:, None] & is_index[None, :]
            b = tl.load(at, mask=mask, other=0.0)
            c = tl.load(at + NET.groups * NET.state_size, mask=mask, other=0.0)
            offsets = matrix_offsets(head, piece + index, column, NET.state_size, NET.head_dim)
            matrix = tl.load(before + offsets, mask=is_index[:, None] & is_column[None, :], other=0.0)
            cb = tl.dot(c, tl.trans(b), cb, input_precision=PRECISE)
            y = tl.dot(c, matrix, y, input_precision=PRECISE)
        is_past = number[:, None] >= number[None, :]
        cb *= tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0))
        y = tl.exp(decay)[:, None] * y + tl.load(d + head) * x
        y = tl.dot(tl.where(is_past, cb, 0.0), dt[:, None] * x, y, input_precision=PRECISE)
        at = out + token.to(tl.int64)[:, None] * (NET.heads * NET.head_dim) + (head * NET.head_dim + column)
        tl.store(at, y, mask=(inside & (token >= 0))[:, None] & is_column[None, :])


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
