"""The kernels of the gated delta net and of Kimi Delta Attention, for decode steps and chunks of a prompt.

The state S of a value head is (HEAD_DIM, HEAD_DIM), sixteen columns after each other. Rows of the state hold
q, k and v before the convolution, then β and g; results of the convolution have the rows of the positions
between the source slot's and the step (`pending`) first, then those of the step.
"""

from typing import Any, NamedTuple

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
from edgeinfer_kernels.cuda.triton_ops.recurrent.triangular_systems import store_solution
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    own_row,
    own_words,
    step_pending,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


class ProjectedRows(NamedTuple):
    """Rows of the projections of a step's tokens (q, k, v first), their scales, and elements per row."""

    rows: Any
    scales: Any
    stride: Any


class DecayVectors(NamedTuple):
    """The vectors of the decay: g = a · softplus(… + dt)."""

    a: Any
    dt: Any


@triton.jit
def delta_convolution_kernel(
    inputs, decay, rows, words, state, taps, out, epsilon,
    NET: tl.constexpr, CONFIG: tl.constexpr, BETA_AT: tl.constexpr, ALPHA_AT: tl.constexpr,
    SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(conv) of one head of q, k or v of one position, pending ones first; q and k with length 1, q also
    by 1 / √HEAD_DIM. And the rows of the state of a step's tokens; g only if it is one number of each head.

    Program (position, head), the last one for β and g; in a batch (position, head, sequence). Reads 8·taps
    bytes per element, writes 8.
    """
    DIMENSIONS: tl.constexpr = NET.dimensions
    TAPS: tl.constexpr = NET.taps
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    row, head = tl.program_id(0), tl.program_id(1)
    words = own_words(words, CONFIG.is_batch)
    rows = own_row(rows, NET.row_width, CONFIG.is_batch)
    out = own_row(out, NET.channels, CONFIG.is_batch)
    source = own_row(inputs.rows, inputs.stride, CONFIG.is_batch)
    inputs = ProjectedRows(source, inputs.scales, inputs.stride)
    pending = step_pending(words)
    token = row - pending
    if row < pending + step_tokens(words):
        own = tl.maximum(token, 0).to(tl.int64)
        target = rows + own * NET.row_width
        if head < 2 * NET.key_heads + NET.value_heads:
            dimension = tl.arange(0, DIMENSIONS)
            mask = dimension < NET.head_dim
            offsets = head * NET.head_dim + dimension
            total = tl.zeros((DIMENSIONS,), tl.float32)
            value = tl.zeros((DIMENSIONS,), tl.float32)
            for tap in tl.static_range(TAPS):
                other = earlier_token(words, token, TAPS - 1 - tap, CONFIG)
                at = tl.maximum(other, 0).to(tl.int64)
                value = tl.load(
                    inputs.rows + at * inputs.stride + offsets, mask=mask & (other >= 0), other=0.0
                )
                if SCALED:
                    value = value * tl.load(inputs.scales + at)
                before, is_before = tl.minimum(other, -1), mask & (other < 0)
                value += load_row(rows, state, words, before, offsets, is_before, CONFIG)
                total += tl.load(taps + tap * NET.channels + offsets, mask=mask, other=0.0) * value
            y = total * sigmoid(total)
            if head < 2 * NET.key_heads:
                square = tl.sum(tl.where(mask, y * y, 0.0), axis=0) + epsilon
                y = y / tl.sqrt(square * tl.where(head < NET.key_heads, NET.head_dim, 1))
            tl.store(out + row.to(tl.int64) * NET.channels + offsets, y, mask=mask)
            tl.store(target + offsets, value, mask=mask & (token >= 0))
        elif token >= 0:
            _store_gates(inputs, decay, target, own, NET, BETA_AT, ALPHA_AT, SCALED)


@triton.jit
def _store_gates(
    inputs, decay, target, token, NET: tl.constexpr, BETA_AT: tl.constexpr, ALPHA_AT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """β, and g if it is one number of each head, of a token to its row; and the padding before them."""
    source = inputs.rows + token * inputs.stride
    scale = 1.0
    if SCALED:
        scale = tl.load(inputs.scales + token)
    padding = NET.channels + tl.arange(0, 16)
    tl.store(target + padding, padding * 0.0, mask=padding < NET.gates_at)
    head = tl.arange(0, NET.padded_heads)
    mask = head < NET.value_heads
    beta = sigmoid(tl.load(source + BETA_AT + head, mask=mask, other=0.0) * scale)
    tl.store(target + NET.gates_at + head, beta, mask=mask)
    if not NET.key_decay:
        alpha = tl.load(source + ALPHA_AT + head, mask=mask, other=0.0) * scale
        rate = softplus(alpha + tl.load(decay.dt + head, mask=mask, other=0.0))
        g = tl.load(decay.a + head, mask=mask, other=0.0) * rate
        tl.store(target + NET.gates_at + NET.gate_width + head, g, mask=mask)


@triton.jit
def _key_head(head, NET: tl.constexpr):
    """The key head of a value head."""
    if NET.repeats_each:
        return head // (NET.value_heads // NET.key_heads)
    else:
        return head % NET.key_heads


@triton.jit
def delta_step_kernel(
    rows, conv, words, state, out, NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a decode step, position by position; program (value head, COLUMNS columns of S), in a
    batch (…, sequence), of a tree (…, token): it processes the tokens on its path, and writes the state
    before the tree.

    Reads and writes every element of S once; results to `out` (tokens, value_heads · HEAD_DIM).
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words = own_words(words, CONFIG.is_batch)
    rows, conv = own_row(rows, NET.row_width, CONFIG.is_batch), own_row(conv, NET.channels, CONFIG.is_batch)
    out = own_row(out, NET.value_heads * NET.head_dim, CONFIG.is_batch)
    head = tl.program_id(0)
    key = tl.arange(0, NET.dimensions)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < NET.head_dim, column < NET.head_dim
    mask = is_key[:, None] & (column < NET.columns)[None, :]
    offsets = NET.matrix_at + matrix_offsets(head, key, column, NET.head_dim, NET.columns)
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    pending, node = step_pending(words), tl.program_id(2)
    slot = state.slots + step_target(words) * CONFIG.slot_width + offsets
    q_at = _key_head(head, NET) * NET.head_dim + key
    v_at = 2 * NET.key_heads * NET.head_dim + head * NET.head_dim + column
    for row in range(pending + step_tokens(words)):
        if CONFIG.is_tree:
            tl.store(slot, matrix, mask=mask & (row == pending) & (node == 0) & (pending > 0))
        if is_on_path(words, node, row - pending, CONFIG):
            line = conv + row * NET.channels
            q = tl.load(line + q_at, mask=is_key, other=0.0)
            k = tl.load(line + NET.key_heads * NET.head_dim + q_at, mask=is_key, other=0.0)
            v = tl.load(line + v_at, mask=is_column, other=0.0)
            gate = NET.gates_at + head
            beta = tl.sum(
                load_row(rows, state, words, row - pending, gate + key * 0, key == 0, CONFIG), axis=0
            )
            gate = NET.gates_at + NET.gate_width
            if NET.key_decay:
                g = load_row(
                    rows, state, words, row - pending, gate + head * NET.head_dim + key, is_key, CONFIG
                )
                matrix = matrix * tl.exp(g)[:, None]
            else:
                gate = gate + head + key * 0
                g = tl.sum(load_row(rows, state, words, row - pending, gate, key == 0, CONFIG), axis=0)
                matrix = matrix * tl.exp(g)
            delta = beta * (v - tl.sum(matrix * k[:, None], axis=0))
            matrix += k[:, None] * delta[None, :]
            is_result = row >= pending
            if CONFIG.is_tree:
                is_result = row == pending + node
            if is_result:
                result = tl.sum(matrix * q[:, None], axis=0)
                at = (row - pending) * NET.value_heads * NET.head_dim + head * NET.head_dim + column
                tl.store(out + at, result, mask=is_column)
    if not CONFIG.is_tree:
        tl.store(slot, matrix, mask=mask)


@triton.jit
def delta_pairs_kernel(
    rows, conv, words, state, out, NET: tl.constexpr, CONFIG: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """What the recurrence of a head needs of COUNT positions besides its state; program (COUNT positions,
    value head).

    With G = Σ g, to `out` for each COUNT positions and head: (1 + tril(β e^(Gi - Gj) Ki Kj))⁻¹ β and
    e^(Gi - Gj) Qi Kj, 0 for j > i, each (COUNT, COUNT); then e^Gj and e^(G - Gj) with the G of the last
    position. Reads Q, K, β and g once.
    """
    head, index = tl.program_id(1), tl.arange(0, COUNT)
    key = tl.arange(0, NET.dimensions)
    row = tl.program_id(0) * COUNT + index
    pending = step_pending(words)
    inside = row < pending + step_tokens(words)
    if tl.program_id(0) * COUNT < pending + step_tokens(words):
        at = conv + row.to(tl.int64)[:, None] * NET.channels + (_key_head(head, NET) * NET.head_dim + key)
        mask = inside[:, None] & (key < NET.head_dim)[None, :]
        q = tl.load(at, mask=mask, other=0.0)
        k = tl.load(at + NET.key_heads * NET.head_dim, mask=mask, other=0.0)
        gate = NET.gates_at + head + index * 0
        beta = load_row(rows, state, words, row - pending, gate, inside, CONFIG)
        g = load_row(rows, state, words, row - pending, gate + NET.gate_width, inside, CONFIG)
        decay = tl.cumsum(g, axis=0)
        end = tl.sum(g, axis=0)
        is_past = index[:, None] >= index[None, :]
        between = tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0))
        part = out + (tl.program_id(0) * NET.value_heads + head).to(tl.int64) * NET.pairs_width
        kk = tl.dot(k, tl.trans(k), input_precision=PRECISE) * between
        store_solution(part, kk, beta, COUNT)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISE) * between
        part += COUNT * COUNT
        tl.store(part + index[:, None] * COUNT + index[None, :], tl.where(is_past, qk, 0.0))
        part += COUNT * COUNT + index
        tl.store(part, tl.exp(decay))
        tl.store(part + COUNT, tl.exp(end - decay))


@triton.jit
def delta_chunk_kernel(
    rows, conv, words, state, pairs, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a chunk of a prompt, COUNT positions at a time with their cumulative decay; program
    (value head, COLUMNS columns of S).

    With G = Σ g: U = (1 + tril(β e^(Gi - Gj) K Kᵀ))⁻¹ β (V - e^G K S);
    O = e^G Q S + tril(e^(Gi - Gj) Q Kᵀ) U; S ← e^G S + (e^(G - Gj) K)ᵀ U, where `pairs` has what doesn't
    depend on V and S. Reads K, Q and V once, S once; results as `delta_step_kernel`.
    """
    head = tl.program_id(0)
    key = tl.arange(0, NET.dimensions)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, COUNT)
    is_key, is_column = key < NET.head_dim, column < NET.head_dim
    mask = is_key[:, None] & (column < NET.columns)[None, :]
    offsets = NET.matrix_at + matrix_offsets(head, key, column, NET.head_dim, NET.columns)
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    pending = step_pending(words)
    total = pending + step_tokens(words)
    q_at = _key_head(head, NET) * NET.head_dim + key
    v_at = 2 * NET.key_heads * NET.head_dim + head * NET.head_dim + column
    for first in range(0, total, COUNT):
        row = first + index
        inside = row < total
        line = conv + row.to(tl.int64)[:, None] * NET.channels
        keys = inside[:, None] & is_key[None, :]
        q = tl.load(line + q_at[None, :], mask=keys, other=0.0)
        k = tl.load(line + NET.key_heads * NET.head_dim + q_at[None, :], mask=keys, other=0.0)
        v = tl.load(line + v_at[None, :], mask=inside[:, None] & is_column[None, :], other=0.0)
        part = pairs + (first // COUNT * NET.value_heads + head).to(tl.int64) * NET.pairs_width
        pair = part + index[:, None] * COUNT + index[None, :]
        solution = tl.load(pair)
        qk = tl.load(pair + COUNT * COUNT, mask=inside[:, None], other=0.0)
        part += 2 * COUNT * COUNT
        if NET.key_decay:
            factor = 1.0
            at = part + index[:, None] * NET.head_dim + key[None, :]
            rest = tl.load(at, mask=is_key[None, :], other=0.0)
            whole = tl.load(part + COUNT * NET.head_dim + key, mask=is_key, other=0.0)[:, None]
        else:
            factor = tl.load(part + index)[:, None]
            rest = k * tl.load(part + COUNT + index)[:, None]
            whole = tl.load(part + COUNT - 1)
        right = v - factor * tl.dot(k, matrix, input_precision=PRECISE)
        delta = tl.dot(solution, right, input_precision=PRECISE)
        result = factor * tl.dot(q, matrix, input_precision=PRECISE)
        result += tl.dot(qk, delta, input_precision=PRECISE)
        matrix = whole * matrix + tl.dot(tl.trans(rest), delta, input_precision=PRECISE)
        at = (row - pending).to(tl.int64)[:, None] * (NET.value_heads * NET.head_dim)
        at += (head * NET.head_dim + column)[None, :]
        tl.store(out + at, result, mask=(inside & (row >= pending))[:, None] & is_column[None, :])
    tl.store(state.slots + step_target(words) * CONFIG.slot_width + offsets, matrix, mask=mask)


@triton.jit
def _gated_head(values, z, scale, weight, epsilon, token, stride, head, dimension, mask, NET: tl.constexpr):
    """norm(o) · silu(z) of one head, or norm(o) · sigmoid(z)."""
    at = token * (NET.value_heads * NET.head_dim) + head * NET.head_dim + dimension
    value = tl.load(values + at, mask=mask, other=0.0)
    square = tl.sum(value * value, axis=0) / NET.head_dim
    normed = value / tl.sqrt(square + epsilon) * tl.load(weight + dimension, mask=mask, other=0.0)
    gate = tl.load(z + token * stride + head * NET.head_dim + dimension, mask=mask, other=0.0) * scale
    if NET.silu_gate:
        normed = normed * gate
    return normed * sigmoid(gate)


@triton.jit
def gate_step_kernel(
    values, z, stride, weight, epsilon, out, NET: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """out = `_gated_head` of a decode step; program (token, value head)."""
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dimension = tl.arange(0, NET.dimensions)
    mask = dimension < NET.head_dim
    y = _gated_head(values, z, 1.0, weight, epsilon, token, stride, head, dimension, mask, NET)
    tl.store(out + token * (NET.value_heads * NET.head_dim) + head * NET.head_dim + dimension, y, mask=mask)


@triton.jit
def gate_chunk_kernel(values, z, scales, stride, weight, epsilon, out, row_scales, NET: tl.constexpr):
    """out = `_gated_head` / row scale of a chunk, float16; one program per token.

    Written with scale 1 first; a row that needs another scale is computed again.
    """
    DIMENSIONS: tl.constexpr = NET.dimensions
    token = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DIMENSIONS)
    mask = dimension < NET.head_dim
    z_scale = tl.load(scales + token)
    to = out + token * (NET.value_heads * NET.head_dim) + dimension
    largest = tl.zeros((DIMENSIONS,), tl.float32)
    for head in range(NET.value_heads):
        y = _gated_head(values, z, z_scale, weight, epsilon, token, stride, head, dimension, mask, NET)
        largest = tl.maximum(largest, tl.abs(y))
        tl.store(to + head * NET.head_dim, y.to(tl.float16), mask=mask)
    scale = row_scale(tl.max(largest, axis=0))
    tl.store(row_scales + token, scale)
    if scale > 1.0:
        for head in range(NET.value_heads):
            y = _gated_head(values, z, z_scale, weight, epsilon, token, stride, head, dimension, mask, NET)
            tl.store(to + head * NET.head_dim, (y / scale).to(tl.float16), mask=mask)
