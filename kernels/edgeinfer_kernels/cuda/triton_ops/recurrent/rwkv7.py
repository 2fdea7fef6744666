"""The kernels of RWKV-7, for decode steps and for chunks of a prompt.

Rows of the state hold h, then for a time mixing w, k, v, κ and κ·a, WIDTH elements each. The matrix of a head
is Sᵀ (HEAD_DIM keys, HEAD_DIM values), sixteen columns after each other. The positions between the source
slot's and the step are *pending*: their rows are processed again.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.compile_target import PRECISE
from edgeinfer_kernels.cuda.prefill.prefill_rows import store_scaled
from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import normed
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import load_row, load_slot, matrix_offsets
from edgeinfer_kernels.cuda.triton_ops.recurrent.triangular_systems import substitute
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    own_row,
    own_words,
    step_pending,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

CHUNK = 16
"""Positions that are evaluated together in a prompt; w is at least 0.54, so their decay stays above 1e-5."""
DECAY = tl.constexpr(-math.exp(-0.5))
W, K, V, REMOVED, ADDED = (tl.constexpr(part) for part in range(1, 6))
"""The parts of a row after h: w, k, v, κ and κ·a."""


class Rwkv7Config(NamedTuple):
    """The sizes of the blocks of RWKV-7. block, dimensions: width and head_dim, powers of two; norm: the kind
    of the norm before the block, with a bias if has_bias. matrix_at: where the matrix begins in a slot.
    """

    width: int
    block: int
    norm: int
    has_bias: bool
    head_dim: int = 16
    dimensions: int = 16
    matrix_at: int = 0


class LowRanks(NamedTuple):
    """Something of each of the low-rank products of w, a, v and g."""

    w: Any
    a: Any
    v: Any
    g: Any


class MixVectors(NamedTuple):
    """The vectors of a time mixing, each of WIDTH elements."""

    w0: Any
    a0: Any
    v0: Any
    k_k: Any
    k_a: Any


class HeadVectors(NamedTuple):
    """The vectors with which the results of the heads are finished."""

    r_k: Any
    weight: Any
    bias: Any


@triton.jit
def _shifted(
    x, norm, rows, words, state, lerp, token, number, offsets, NET: tl.constexpr, CONFIG: tl.constexpr
):
    """h of a token, and h + μ (h₋₁ - h) for input `number`."""
    WIDTH: tl.constexpr = NET.width
    mask = offsets < WIDTH
    own = tl.load(x + token * WIDTH + offsets, mask=mask, other=0.0)
    own = normed(own, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NET.norm, NET.has_bias)
    before = tl.load(x + tl.maximum(token - 1, 0) * WIDTH + offsets, mask=mask, other=0.0)
    before = normed(
        before, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NET.norm, NET.has_bias
    )
    kept = load_row(rows, state, words, tl.minimum(token - 1, -1), offsets, mask & (token == 0), CONFIG)
    before = tl.where(token > 0, before, kept)
    mu = tl.load(lerp + number * WIDTH + offsets, mask=mask, other=0.0)
    return tl.where(mask, own, 0.0), tl.where(mask, own + mu * (before - own), 0.0)


@triton.jit
def token_shift_step_kernel(
    x, norm, rows, words, state, lerp, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The inputs of a decode step as activations, TOKENS rows for each; h = norm(x) to the rows of the state.

    Program (token, input), in a batch (0, input, sequence). Reads two rows of x, writes 12 words (44 with
    floats) per 32 columns.
    """
    BLOCK: tl.constexpr = NET.block
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words, x = own_words(words, CONFIG.is_batch), own_row(x, NET.width, CONFIG.is_batch)
    rows = own_row(rows, CONFIG.row_width, CONFIG.is_batch)
    token, number = tl.program_id(0), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    h, value = _shifted(x, norm, rows, words, state, lerp, token, number, offsets, NET, CONFIG)
    if number == 0:
        tl.store(rows + token * CONFIG.row_width + offsets, h, mask=offsets < NET.width)
    group = tl.arange(0, BLOCK // 16)
    value = tl.reshape(value, (BLOCK // 16, 16))
    row = number * TOKENS + token + tl.program_id(2)
    quantize(value, out, group, group < 2 * OUT.blocks, OUT, row)


@triton.jit
def token_shift_chunk_kernel(
    x, norm, rows, words, state, lerp, out, row_scales, NET: tl.constexpr, CONFIG: tl.constexpr
):  # fmt: skip
    """The inputs of a chunk / row scale, (inputs, tokens, WIDTH) float16; h to the rows of the state.

    Program (token, input). Reads two rows of x, writes 2 bytes per element.
    """
    BLOCK: tl.constexpr = NET.block
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    h, value = _shifted(x, norm, rows, words, state, lerp, token, number, offsets, NET, CONFIG)
    if number == 0:
        tl.store(rows + token * CONFIG.row_width + offsets, h, mask=offsets < NET.width)
    row = number * tl.num_programs(0) + token
    store_scaled(out, row_scales, row, value, offsets, offsets < NET.width, NET.width)


@triton.jit
def _quantize_low(low, out, token, RANK: tl.constexpr, ACTIVATION: tl.constexpr, OUT: tl.constexpr):
    """One low-rank row of a token as activations, after tanh (1) or sigmoid (2)."""
    GROUPS: tl.constexpr = triton.next_power_of_2(2 * OUT.blocks)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < RANK
    value = tl.load(low + column, mask=inside, other=0.0)
    if ACTIVATION == 1:
        decay = tl.exp(-2.0 * tl.abs(value))
        size = (1.0 - decay) / (1.0 + decay)
        value = tl.where(value < 0, -size, size)
    elif ACTIVATION == 2:
        value = sigmoid(value)
    quantize(tl.where(inside, value, 0.0), out, group, group < 2 * OUT.blocks, OUT, token)


@triton.jit
def low_rank_step_kernel(
    low, stride, outs, TOKENS: tl.constexpr, RANKS: tl.constexpr,
    W_OUT: tl.constexpr, A_OUT: tl.constexpr, V_OUT: tl.constexpr, G_OUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """tanh(W₁ x), A₁ x, V₁ x and sigmoid(G₁ x) of a decode step as activations; program (token, which).

    `low`: (4, TOKENS, stride) float32. Reads 4 bytes per element, writes 12 words per 32.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, number = tl.program_id(0), tl.program_id(1)
    row = low + (number * TOKENS + token) * stride
    if number == 0:
        _quantize_low(row, outs.w, token, RANKS.w, 1, W_OUT)
    elif number == 1:
        _quantize_low(row, outs.a, token, RANKS.a, 0, A_OUT)
    elif number == 2:
        _quantize_low(row, outs.v, token, RANKS.v, 0, V_OUT)
    else:
        _quantize_low(row, outs.g, token, RANKS.g, 2, G_OUT)


@triton.jit
def _own_head(NET: tl.constexpr):
    """The token of a program (token, head), and the offsets of its head's elements with their mask."""
    dimension = tl.arange(0, NET.dimensions)
    offsets = tl.program_id(1) * NET.head_dim + dimension
    return tl.program_id(0).to(tl.int64), offsets, dimension < NET.head_dim


@triton.jit
def prepare_heads_kernel(
    rows, value_rates, first_values, vectors,
    NET: tl.constexpr, ROW: tl.constexpr, IS_FIRST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """w, k, v, κ and κ·a of a head of a token in its row of the state, where the products were: W₂ … instead
    of w, A₂ … instead of κ·a. v of the first layer to `first_values`; V₂ … of the others in `value_rates`.

    Program (token, head). Reads and writes 20 bytes per element. ROW: elements of a row.
    """
    WIDTH: tl.constexpr = NET.width
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, offsets, mask = _own_head(NET)
    row = rows + token * ROW + offsets
    decay = tl.load(vectors.w0 + offsets, mask=mask, other=0.0) + tl.load(
        row + W * WIDTH, mask=mask, other=0.0
    )
    tl.store(row + W * WIDTH, tl.exp(sigmoid(decay) * DECAY), mask=mask)
    rate = tl.load(vectors.a0 + offsets, mask=mask, other=0.0)
    rate = sigmoid(rate + tl.load(row + ADDED * WIDTH, mask=mask, other=0.0))
    v = tl.load(row + V * WIDTH, mask=mask, other=0.0)
    first = first_values + token * WIDTH + offsets
    if IS_FIRST:
        tl.store(first, v, mask=mask)
    else:
        share = tl.load(value_rates + token * WIDTH + offsets, mask=mask, other=0.0)
        share = sigmoid(share + tl.load(vectors.v0 + offsets, mask=mask, other=0.0))
        v += (tl.load(first, mask=mask, other=0.0) - v) * share
        tl.store(row + V * WIDTH, v, mask=mask)
    k = tl.load(row + K * WIDTH, mask=mask, other=0.0)
    removed = k * tl.load(vectors.k_k + offsets, mask=mask, other=0.0)
    removed = removed / tl.maximum(tl.sqrt(tl.sum(removed * removed, axis=0)), 1e-12)
    tl.store(row + REMOVED * WIDTH, removed, mask=mask)
    tl.store(row + ADDED * WIDTH, removed * rate, mask=mask)
    k += k * tl.load(vectors.k_a + offsets, mask=mask, other=0.0) * (rate - 1.0)
    tl.store(row + K * WIDTH, k, mask=mask)


@triton.jit
def _columns_of_head(NET: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys and columns of a program (head, COLUMNS columns of Sᵀ), and the offsets in a slot of this part of
    the matrix with their mask.
    """
    key = tl.arange(0, NET.dimensions)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (key < NET.head_dim)[:, None] & (column < NET.head_dim)[None, :]
    at = matrix_offsets(tl.program_id(0), key, column, NET.head_dim, NET.head_dim)
    return key, column, NET.matrix_at + at, mask


@triton.jit
def time_mix_step_kernel(
    rows, receptance, words, state, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a decode step, position by position; program (head, COLUMNS columns of Sᵀ), in a
    batch (…, sequence).

    Reads and writes every element of S once; S r to `out` (tokens, WIDTH).
    """
    WIDTH: tl.constexpr = NET.width
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words, rows = own_words(words, CONFIG.is_batch), own_row(rows, CONFIG.row_width, CONFIG.is_batch)
    receptance, out = own_row(receptance, WIDTH, CONFIG.is_batch), own_row(out, WIDTH, CONFIG.is_batch)
    key, column, offsets, mask = _columns_of_head(NET, COLUMNS)
    head = tl.program_id(0)
    is_key, is_column = key < NET.head_dim, column < NET.head_dim
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    pending = step_pending(words)
    k_at, v_at = head * NET.head_dim + key, head * NET.head_dim + column
    for index in range(pending + step_tokens(words)):
        token = index - pending
        w = load_row(rows, state, words, token, W * WIDTH + k_at, is_key, CONFIG)
        k = load_row(rows, state, words, token, K * WIDTH + k_at, is_key, CONFIG)
        v = load_row(rows, state, words, token, V * WIDTH + v_at, is_column, CONFIG)
        removed = load_row(rows, state, words, token, REMOVED * WIDTH + k_at, is_key, CONFIG)
        added = load_row(rows, state, words, token, ADDED * WIDTH + k_at, is_key, CONFIG)
        known = tl.sum(matrix * removed[:, None], axis=0)
        matrix = matrix * w[:, None] - added[:, None] * known[None, :] + k[:, None] * v[None, :]
        if token >= 0:
            r = tl.load(receptance + token * WIDTH + k_at, mask=is_key, other=0.0)
            tl.store(out + token * WIDTH + v_at, tl.sum(matrix * r[:, None], axis=0), mask=is_column)
    tl.store(state.slots + step_target(words) * CONFIG.slot_width + offsets, matrix, mask=mask)


@triton.jit
def time_mix_chunk_kernel(
    rows, receptance, words, state, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a chunk of a prompt, COUNT positions at a time with their cumulative decay; program
    (head, COLUMNS columns of M = Sᵀ).

    With P_i = w_1 … w_i for each key element, K̂ = K / P, Â = (κ a) / P, κ̂_i = κ_i P_i₋₁ and R̂ = R P:
    (1 + tril₋₁(κ̂ Âᵀ)) U = -(κ̂ M + tril₋₁(κ̂ K̂ᵀ) V); O = R̂ M + tril(R̂ Âᵀ) U + tril(R̂ K̂ᵀ) V;
    M ← P_end (M + Âᵀ U + K̂ᵀ V). Reads each row once, M once; results as `time_mix_step_kernel`.
    """
    WIDTH: tl.constexpr = NET.width
    key, column, offsets, mask = _columns_of_head(NET, COLUMNS)
    head, index = tl.program_id(0), tl.arange(0, COUNT)
    is_key, is_column = key < NET.head_dim, column < NET.head_dim
    matrix = load_slot(state, words, offsets, mask, CONFIG)
    pending = step_pending(words)
    total = pending + step_tokens(words)
    k_at, v_at = (head * NET.head_dim + key)[None, :], (head * NET.head_dim + column)[None, :]
    is_past, is_own = index[:, None] > index[None, :], index[:, None] >= index[None, :]
    for first in tl.range(0, total, COUNT, num_stages=1):
        inside = first + index < total
        token = (first + index - pending)[:, None]
        keys, columns = inside[:, None] & is_key[None, :], inside[:, None] & is_column[None, :]
        w = load_row(rows, state, words, token, W * WIDTH + k_at, keys, CONFIG)
        decay = tl.where(keys, tl.log(tl.where(keys, w, 1.0)), 0.0)
        end = tl.exp(tl.sum(decay, axis=0))
        until = tl.cumsum(decay, axis=0)
        grown = tl.exp(-until)
        k = load_row(rows, state, words, token, K * WIDTH + k_at, keys, CONFIG) * grown
        v = load_row(rows, state, words, token, V * WIDTH + v_at, columns, CONFIG)
        added = load_row(rows, state, words, token, ADDED * WIDTH + k_at, keys, CONFIG) * grown
        removed = load_row(rows, state, words, token, REMOVED * WIDTH + k_at, keys, CONFIG)
        removed *= tl.exp(until - decay)
        at = tl.maximum(token, 0).to(tl.int64) * WIDTH
        r = tl.load(receptance + at + k_at, mask=keys & (token >= 0), other=0.0) * tl.exp(until)
        lower = tl.where(is_past, tl.dot(removed, tl.trans(added), input_precision=PRECISE), 0.0)
        known = tl.where(is_past, tl.dot(removed, tl.trans(k), input_precision=PRECISE), 0.0)
        right = tl.dot(removed, matrix, input_precision=PRECISE)
        delta = substitute(lower, -right - tl.dot(known, v, input_precision=PRECISE), COUNT)
        result = tl.dot(r, matrix, input_precision=PRECISE)
        of_delta = tl.where(is_own, tl.dot(r, tl.trans(added), input_precision=PRECISE), 0.0)
        result += tl.dot(of_delta, delta, input_precision=PRECISE)
        of_value = tl.where(is_own, tl.dot(r, tl.trans(k), input_precision=PRECISE), 0.0)
        result += tl.dot(of_value, v, input_precision=PRECISE)
        matrix += tl.dot(tl.trans(added), delta, input_precision=PRECISE)
        matrix = end[:, None] * (matrix + tl.dot(tl.trans(k), v, input_precision=PRECISE))
        tl.store(out + at + v_at, result, mask=columns & (token >= 0))
    tl.store(state.slots + step_target(words) * CONFIG.slot_width + offsets, matrix, mask=mask)


@triton.jit
def finish_heads_kernel(
    values, receptance, rows, gates, vectors, epsilon,
    NET: tl.constexpr, ROW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """values = (norm(values) + v (r · r_k · k)) · g of a head, in place; program (token, head).

    Reads 20 bytes per element, writes 4. ROW: elements of a row of the state.
    """
    WIDTH: tl.constexpr = NET.width
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, offsets, mask = _own_head(NET)
    at, row = token * WIDTH + offsets, rows + token * ROW + offsets
    value = tl.load(values + at, mask=mask, other=0.0)
    value = tl.where(mask, value - tl.sum(value, axis=0) / NET.head_dim, 0.0)
    value = value / tl.sqrt(tl.sum(value * value, axis=0) / NET.head_dim + epsilon)
    value = value * tl.load(vectors.weight + offsets, mask=mask, other=0.0)
    value += tl.load(vectors.bias + offsets, mask=mask, other=0.0)
    weighted = tl.load(receptance + at, mask=mask, other=0.0)
    weighted *= tl.load(vectors.r_k + offsets, mask=mask, other=0.0)
    bonus = tl.sum(weighted * tl.load(row + K * WIDTH, mask=mask, other=0.0), axis=0)
    value += bonus * tl.load(row + V * WIDTH, mask=mask, other=0.0)
    tl.store(values + at, value * tl.load(gates + at, mask=mask, other=0.0), mask=mask)
