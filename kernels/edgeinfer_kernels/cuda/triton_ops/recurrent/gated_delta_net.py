"""The kernels of the gated delta net and of Kimi Delta Attention, for decode steps and chunks of a prompt.

The state S of a value head is (HEAD_DIM, HEAD_DIM), sixteen columns after each other. Rows of the state hold
q, k and v before the convolution, then β and g; results of the convolution have the rows of the positions
between the source slot's and the step (`pending`) first, then those of the step.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.compile_target import PRECISE
from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid, softplus
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import (
    earlier_token,
    is_on_path,
    load_kept_row,
    load_row,
    load_slot,
    matrix_offsets,
)
from edgeinfer_kernels.cuda.triton_ops.recurrent.triangular_systems import store_solution
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    own_row,
    own_words,
    step_pending,
    step_ring,
    step_start,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


class DeltaNetConfig(NamedTuple):
    """The sizes of a gated delta net. dimensions, padded_heads: head_dim and value_heads, powers of two;
    columns: of a head's state, padded; channels: elements of q, k and v. In a row of the state β begins at
    gates_at, and g gate_width after it. matrix_at: where the matrix begins in a slot. key_decay: each key
    element of a head has a decay, else each head. silu_gate: the gate is silu(z), else sigmoid(z).
    pairs_width: as `DeltaRuleSizes` describes.
    """

    key_heads: int
    value_heads: int
    head_dim: int
    dimensions: int
    columns: int
    channels: int
    row_width: int
    gates_at: int
    gate_width: int
    padded_heads: int
    matrix_at: int
    repeats_each: bool
    key_decay: bool
    silu_gate: bool
    pairs_width: int
    taps: int


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
    """silu(conv) of one head of q, k or v of some positions, pending ones first; q and k with length 1, q
    also by 1 / √HEAD_DIM. And the rows of the state of a step's tokens; g only if it is one number of each
    head.

    Program (position, head), the last one for β and g; in a batch (position, head, sequence). If there are
    more positions than programs, each has every n-th. Reads 8·taps bytes per element, writes 8. What the
    step's earlier kernels don't write is read before they end.
    """
    TAPS: tl.constexpr = NET.taps
    release_consumers(DEPENDENT)
    first, head = tl.program_id(0), tl.program_id(1)
    words = own_words(words, CONFIG.is_batch)
    rows = own_row(rows, NET.row_width, CONFIG.is_batch)
    out = own_row(out, NET.channels, CONFIG.is_batch)
    source = own_row(inputs.rows, inputs.stride, CONFIG.is_batch)
    inputs = ProjectedRows(source, inputs.scales, inputs.stride)
    pending = step_pending(words)
    end = pending + step_tokens(words)
    dimension = tl.arange(0, NET.dimensions)
    mask = (dimension < NET.head_dim) & (head < 2 * NET.key_heads + NET.value_heads)
    offsets = head * NET.head_dim + dimension
    factors = ()
    for tap in tl.static_range(TAPS):
        factors = factors + (tl.load(taps + tap * NET.channels + offsets, mask=mask, other=0.0),)
    before = _rows_before(rows, state, words, first - pending, offsets, mask & (first < end), NET, CONFIG)
    rate = _load_decay(decay, head, NET)
    wait_for_producers(DEPENDENT)
    for position in range(first, end, tl.num_programs(0)):
        row = pending * 0 + position
        token = row - pending
        own = tl.maximum(token, 0).to(tl.int64)
        target = rows + own * NET.row_width
        if head < 2 * NET.key_heads + NET.value_heads:
            y, value = _convolved(inputs, words, token, offsets, mask, factors, before, NET, CONFIG, SCALED)
            if head < 2 * NET.key_heads:
                square = tl.sum(tl.where(mask, y * y, 0.0), axis=0) + epsilon
                y = y / tl.sqrt(square * tl.where(head < NET.key_heads, NET.head_dim, 1))
            tl.store(out + row.to(tl.int64) * NET.channels + offsets, y, mask=mask)
            tl.store(target + offsets, value, mask=mask & (token >= 0))
        elif token >= 0:
            _store_gates(inputs, rate, target, own, NET, BETA_AT, ALPHA_AT, SCALED)
        following = row + tl.num_programs(0)
        if following < end:
            before = _rows_before(rows, state, words, following - pending, offsets, mask, NET, CONFIG)


@triton.jit
def _rows_before(
    rows, state, words, token, offsets, mask, NET: tl.constexpr, CONFIG: tl.constexpr
):  # fmt: skip
    """For each tap, elements of the row that it multiplies for a token, if that row precedes the step, else
    zeros.
    """
    TAPS: tl.constexpr = NET.taps
    before = ()
    for tap in tl.static_range(TAPS):
        other = earlier_token(words, token, TAPS - 1 - tap, CONFIG)
        at, is_before = tl.minimum(other, -1), mask & (other < 0)
        before = before + (load_row(rows, state, words, at, offsets, is_before, CONFIG),)
    return before


@triton.jit
def _convolved(
    inputs, words, token, offsets, mask, factors, before, NET: tl.constexpr, CONFIG: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """silu(conv) of a token, and its own row; `before`: `_rows_before`."""
    TAPS: tl.constexpr = NET.taps
    values = ()
    for tap in tl.static_range(TAPS):
        other = earlier_token(words, token, TAPS - 1 - tap, CONFIG)
        at = tl.maximum(other, 0).to(tl.int64)
        value = tl.load(inputs.rows + at * inputs.stride + offsets, mask=mask & (other >= 0), other=0.0)
        if SCALED:
            value = value * tl.load(inputs.scales + at)
        values = values + (value,)
    total = tl.zeros(offsets.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        total += factors[tap] * (values[tap] + before[tap])
    return total * sigmoid(total), values[TAPS - 1] + before[TAPS - 1]


@triton.jit
def _load_decay(decay, head, NET: tl.constexpr):
    """The vectors of the decay of all value heads, for the program of β and g."""
    value_head = tl.arange(0, NET.padded_heads)
    mask = (value_head < NET.value_heads) & (head == 2 * NET.key_heads + NET.value_heads)
    if NET.key_decay:
        return DecayVectors(0.0, 0.0)
    else:
        a = tl.load(decay.a + value_head, mask=mask, other=0.0)
        return DecayVectors(a, tl.load(decay.dt + value_head, mask=mask, other=0.0))


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
        g = decay.a * softplus(alpha + decay.dt)
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

    Reads and writes every element of S once; results to `out` (tokens, value_heads · HEAD_DIM): qᵀS plus
    q·k times what is added to S for k. S is read before the step's earlier kernels end, and what a position
    needs besides S while the previous one is computed.
    """
    release_consumers(DEPENDENT)
    words = own_words(words, CONFIG.is_batch)
    rows, conv = own_row(rows, NET.row_width, CONFIG.is_batch), own_row(conv, NET.channels, CONFIG.is_batch)
    out = own_row(out, NET.value_heads * NET.head_dim, CONFIG.is_batch)
    head, node = tl.program_id(0), tl.program_id(2)
    key = tl.arange(0, NET.dimensions)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (key < NET.head_dim)[:, None] & (column < NET.columns)[None, :]
    offsets = NET.matrix_at + matrix_offsets(head, key, column, NET.head_dim, NET.columns)
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    slot = state.slots + step_target(words) * CONFIG.slot_width + offsets
    pending, tokens = step_pending(words), step_tokens(words)
    start, ring = step_start(words), step_ring(words)
    wait_for_producers(DEPENDENT)
    q, k, v, qk, beta, decay = _delta_inputs(
        rows, conv, state, start, ring, pending, tokens, -pending, head, key, column, NET, CONFIG
    )
    for position in range(pending + tokens):
        token = position - pending
        next_q, next_k, next_v, next_qk, next_beta, next_decay = _delta_inputs(
            rows, conv, state, start, ring, pending, tokens, token + 1, head, key, column, NET, CONFIG
        )
        if CONFIG.is_tree:
            tl.store(slot, matrix, mask=mask & (token == 0) & (node == 0) & (pending > 0))
        if is_on_path(words, node, token, CONFIG):
            matrix = matrix * (decay[:, None] if NET.key_decay else decay)
            delta = beta * (v - tl.sum(matrix * k[:, None], axis=0))
            result = tl.sum(matrix * q[:, None], axis=0) + qk * delta
            matrix += k[:, None] * delta[None, :]
            is_result = token >= 0
            if CONFIG.is_tree:
                is_result = token == node
            at = tl.maximum(token, 0) * NET.value_heads * NET.head_dim + head * NET.head_dim + column
            tl.store(out + at, result, mask=(column < NET.head_dim) & is_result)
        q, k, v, qk, beta, decay = next_q, next_k, next_v, next_qk, next_beta, next_decay
    if not CONFIG.is_tree:
        tl.store(slot, matrix, mask=mask)


@triton.jit
def _delta_inputs(
    rows, conv, state, start, ring, pending, tokens, token, head, key, column, NET: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """q, k, v, q·k, β and e^g of a token of a step, or of a pending one; zeros, and e^0, after the last
    token.
    """
    is_row, is_key = token < tokens, key < NET.head_dim
    line = conv + (pending + token) * NET.channels
    q_at = _key_head(head, NET) * NET.head_dim + key
    v_at = 2 * NET.key_heads * NET.head_dim + head * NET.head_dim + column
    q = tl.load(line + q_at, mask=is_key & is_row, other=0.0)
    k = tl.load(line + NET.key_heads * NET.head_dim + q_at, mask=is_key & is_row, other=0.0)
    v = tl.load(line + v_at, mask=(column < NET.head_dim) & is_row, other=0.0)
    gate = NET.gates_at + head
    beta = load_kept_row(rows, state, start, ring, token, gate, is_row, CONFIG)
    if NET.key_decay:
        gate = NET.gates_at + NET.gate_width + head * NET.head_dim + key
        g = load_kept_row(rows, state, start, ring, token, gate, is_key & is_row, CONFIG)
    else:
        g = load_kept_row(rows, state, start, ring, token, gate + NET.gate_width, is_row, CONFIG)
    return q, k, v, tl.sum(q * k, axis=0), beta, tl.exp(g)


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
