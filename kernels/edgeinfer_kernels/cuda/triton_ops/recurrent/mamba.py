"""The kernels of Mamba-1, for decode steps and for chunks of a prompt.

The state S of sixteen channels is (STATE_SIZE, 16), one after the other. Rows of the state hold x before the
convolution, then Δ and B. The positions between the source slot's and the step are *pending*: their rows
are processed again.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid, softplus
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import load_row
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    own_row,
    own_words,
    step_pending,
    step_source,
    step_start,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


class MambaConfig(NamedTuple):
    """The sizes of a Mamba-1 block. states, ranks: state_size and dt_rank, powers of two. In a row of the
    state Δ begins at delta_at, B at b_at. matrix_at: where the matrix begins in a slot. has_norm: dt, B and
    C are normalized.
    """

    channels: int
    state_size: int
    states: int
    dt_rank: int
    ranks: int
    taps: int
    row_width: int
    delta_at: int
    b_at: int
    matrix_at: int
    has_norm: bool


class MambaVectors(NamedTuple):
    """The vectors of a Mamba block: taps (taps, channels) with their bias, the bias of Δ, A in the layout of
    the state, and D.
    """

    taps: Any
    taps_bias: Any
    dt_bias: Any
    a: Any
    skip: Any


class MambaNorms(NamedTuple):
    """The weights of the norms of dt, B and C."""

    dt: Any
    b: Any
    c: Any


class ScanInputs(NamedTuple):
    """What the recurrence reads of each token: u, W_dt dt with its row scales, z, and C."""

    u: Any
    deltas: Any
    scales: Any
    z: Any
    c: Any


class ScanStrides(NamedTuple):
    """Elements between the tokens of `ScanInputs`."""

    deltas: Any
    z: Any
    c: Any


@triton.jit
def mamba_convolution_kernel(
    inputs, scales, stride, words, state, taps, bias, rows, out, gates,
    NET: tl.constexpr, CONFIG: tl.constexpr, Z_AT: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """u = silu(conv(x) + bias) of BLOCK channels of a token to `out`, and x to its row of the state; `inputs`
    begin with x. With SCALED, z to `gates`, both with the row scales applied.

    Program (token, piece), in a batch (0, piece, sequence). Reads 8·taps bytes per element, writes 8 (12 with
    z).
    """
    TAPS: tl.constexpr = NET.taps
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words, inputs = own_words(words, CONFIG.is_batch), own_row(inputs, stride, CONFIG.is_batch)
    rows, out = own_row(rows, NET.row_width, CONFIG.is_batch), own_row(out, NET.channels, CONFIG.is_batch)
    token = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < NET.channels
    total = tl.load(bias + offsets, mask=mask, other=0.0)
    x = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        other = token + tap - (TAPS - 1)
        at = tl.maximum(other, 0).to(tl.int64)
        x = tl.load(inputs + at * stride + offsets, mask=mask & (other >= 0), other=0.0)
        if SCALED:
            x = x * tl.load(scales + at)
        x += load_row(rows, state, words, tl.minimum(other, -1), offsets, mask & (other < 0), CONFIG)
        total += tl.load(taps + tap * NET.channels + offsets, mask=mask, other=0.0) * x
    line = token.to(tl.int64)
    tl.store(rows + line * NET.row_width + offsets, x, mask=mask)
    tl.store(out + line * NET.channels + offsets, total * sigmoid(total), mask=mask)
    if SCALED:
        z = tl.load(inputs + line * stride + Z_AT + offsets, mask=mask, other=0.0) * tl.load(scales + line)
        tl.store(gates + line * NET.channels + offsets, z, mask=mask)


@triton.jit
def _normed(value, mask, weight, offsets, epsilon, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr):
    """The RMS norm of a whole row, if there is one."""
    if HAS_NORM:
        square = tl.sum(value * value, axis=0) / WIDTH
        value = value / tl.sqrt(square + epsilon) * tl.load(weight + offsets, mask=mask, other=0.0)
    return value


@triton.jit
def mamba_selected_kernel(
    inputs, scales, stride, norms, epsilon, rows, dt, dt_scales, c, c_stride,
    NET: tl.constexpr, B_AT: tl.constexpr, C_AT: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """dt, B and C of a token, normalized if they have norms: B to its row of the state, C to `c`, dt to `dt`;
    with SCALED the row scales are applied, and dt is written in float16 over its own scale.

    One program per token. Reads and writes at most 4 bytes per element.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    source = inputs + token * stride
    rank, index = tl.arange(0, NET.ranks), tl.arange(0, NET.states)
    is_rank, is_index = rank < NET.dt_rank, index < NET.state_size
    value = tl.load(source + rank, mask=is_rank, other=0.0)
    b = tl.load(source + B_AT + index, mask=is_index, other=0.0)
    c_row = tl.load(source + C_AT + index, mask=is_index, other=0.0)
    if SCALED:
        scale = tl.load(scales + token)
        value, b, c_row = value * scale, b * scale, c_row * scale
    value = _normed(value, is_rank, norms.dt, rank, epsilon, NET.dt_rank, NET.has_norm)
    b = _normed(b, is_index, norms.b, index, epsilon, NET.state_size, NET.has_norm)
    c_row = _normed(c_row, is_index, norms.c, index, epsilon, NET.state_size, NET.has_norm)
    tl.store(rows + token * NET.row_width + NET.b_at + index, b, mask=is_index)
    tl.debug_barrier()  # `c` and `dt_scales` may be what was read.
    tl.store(c + token * c_stride + index, c_row, mask=is_index)
    if SCALED:
        dt_scale = row_scale(tl.max(tl.abs(value), axis=0))
        tl.store(dt_scales + token, dt_scale)
        tl.store(dt + token * NET.dt_rank + rank, (value / dt_scale).to(tl.float16), mask=is_rank)
    else:
        tl.store(dt + token * NET.dt_rank + rank, value, mask=is_rank)


@triton.jit
def _convolved(state, words, rows, vectors, token, channel, mask, NET: tl.constexpr, CONFIG: tl.constexpr):
    """u of a pending position."""
    TAPS: tl.constexpr = NET.taps
    total = tl.load(vectors.taps_bias + channel, mask=mask, other=0.0)
    for tap in tl.static_range(TAPS):
        x = load_row(rows, state, words, token + tap - (TAPS - 1), channel, mask, CONFIG)
        total += tl.load(vectors.taps + tap * NET.channels + channel, mask=mask, other=0.0) * x
    return total * sigmoid(total)


@triton.jit
def _updated(matrix, rate, delta, u, b):
    """S ← e^(Δ A) S + Δ u Bᵀ, (states, channels)."""
    return matrix * tl.exp(delta[None, :] * rate) + b[:, None] * (delta * u)[None, :]


@triton.jit
def _token_inputs(
    inputs, strides, rows, token, channel, index, is_channel, is_index, is_token,
    NET: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """W_dt dt, u, z, B and C of a token."""
    line, here = token.to(tl.int64), is_channel & is_token
    delta = tl.load(inputs.deltas + line * strides.deltas + channel, mask=here, other=0.0)
    if SCALED:
        delta = delta * tl.load(inputs.scales + line, mask=is_token, other=0.0)
    u = tl.load(inputs.u + line * NET.channels + channel, mask=here, other=0.0)
    z = tl.load(inputs.z + line * strides.z + channel, mask=here, other=0.0)
    b = tl.load(rows + line * NET.row_width + NET.b_at + index, mask=is_index & is_token, other=0.0)
    c = tl.load(inputs.c + line * strides.c + index, mask=is_index & is_token, other=0.0)
    return delta, u, z, b, c


@triton.jit
def mamba_scan_kernel(
    inputs, strides, vectors, rows, words, state, out,
    NET: tl.constexpr, CONFIG: tl.constexpr, CHANNELS: tl.constexpr, SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The recurrence of a step or of a chunk: (S C + D u) · silu(z) to `out` (tokens, channels), Δ to the
    rows of the state. Program CHANNELS channels, in a batch (channels, 0, sequence); S stays in registers.

    Reads and writes every element of S once, 12 bytes per element of u; the inputs of a token are loaded
    while the one before it is processed.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    IS_BATCH: tl.constexpr = CONFIG.is_batch
    words, rows = own_words(words, IS_BATCH), own_row(rows, NET.row_width, IS_BATCH)
    out = own_row(out, NET.channels, IS_BATCH)
    inputs = ScanInputs(
        own_row(inputs.u, NET.channels, IS_BATCH), own_row(inputs.deltas, strides.deltas, IS_BATCH),
        inputs.scales, own_row(inputs.z, strides.z, IS_BATCH), own_row(inputs.c, strides.c, IS_BATCH),
    )  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    index = tl.arange(0, NET.states)
    is_channel, is_index = channel < NET.channels, index < NET.state_size
    mask = is_index[:, None] & is_channel[None, :]
    offsets = (channel // 16 * (16 * NET.state_size) + channel % 16)[None, :] + index[:, None] * 16
    rate = tl.load(vectors.a + offsets, mask=mask, other=0.0)
    pending, tokens = step_pending(words), step_tokens(words)
    is_real = step_start(words) > pending
    source = state.slots + step_source(words) * CONFIG.slot_width + NET.matrix_at
    matrix = tl.load(source + offsets, mask=mask & is_real, other=0.0)
    for row in range(pending):
        token = row - pending
        u = _convolved(state, words, rows, vectors, token, channel, is_channel, NET, CONFIG)
        delta = load_row(rows, state, words, token, NET.delta_at + channel, is_channel, CONFIG)
        b = load_row(rows, state, words, token, NET.b_at + index, is_index, CONFIG)
        matrix = _updated(matrix, rate, delta, u, b)
    dt_bias = tl.load(vectors.dt_bias + channel, mask=is_channel, other=0.0)
    skip = tl.load(vectors.skip + channel, mask=is_channel, other=0.0)
    delta, u, z, b, c = _token_inputs(
        inputs, strides, rows, tokens * 0, channel, index, is_channel, is_index, tokens > 0, NET, SCALED
    )
    for token in range(tokens):
        following = token + 1
        next_delta, next_u, next_z, next_b, next_c = _token_inputs(
            inputs, strides, rows, tokens * 0 + following, channel, index, is_channel, is_index,
            following < tokens, NET, SCALED,
        )  # fmt: skip
        delta = softplus(delta + dt_bias)
        matrix = _updated(matrix, rate, delta, u, b)
        y = (tl.sum(matrix * c[:, None], axis=0) + skip * u) * z * sigmoid(z)
        line = (tokens * 0 + token).to(tl.int64)
        tl.store(out + line * NET.channels + channel, y, mask=is_channel)
        tl.store(rows + line * NET.row_width + NET.delta_at + channel, delta, mask=is_channel)
        delta, u, z, b, c = next_delta, next_u, next_z, next_b, next_c
    target = state.slots + step_target(words) * CONFIG.slot_width + NET.matrix_at
    tl.store(target + offsets, matrix, mask=mask)
