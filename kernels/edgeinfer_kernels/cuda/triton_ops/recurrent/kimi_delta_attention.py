"""The kernels of Kimi Delta Attention that a gated delta net doesn't have: each key element has a decay."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.activations import softplus
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import load_row
from edgeinfer_kernels.cuda.triton_ops.recurrent.triangular_systems import store_solution
from edgeinfer_kernels.cuda.triton_ops.step_words import step_pending, step_tokens
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


@triton.jit
def key_decay_kernel(
    inputs, scales, stride, a, dt, rows,
    NET: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """g = a · softplus(F₂ F₁ h + dt) of a step's tokens to the rows of the state; program (token, piece of
    BLOCK elements). Reads and writes 4 bytes per element.
    """
    WIDTH: tl.constexpr = NET.value_heads * NET.head_dim
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    value = tl.load(inputs + token * stride + offsets, mask=mask, other=0.0)
    if SCALED:
        value = value * tl.load(scales + token)
    rate = softplus(value + tl.load(dt + offsets, mask=mask, other=0.0))
    g = tl.load(a + offsets, mask=mask, other=0.0) * rate
    tl.store(rows + token * NET.row_width + NET.gates_at + NET.gate_width + offsets, g, mask=mask)


@triton.jit
def low_rank_rows_kernel(
    inputs, scales, stride, out, row_scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out (tokens, WIDTH) float16 = inputs · scales / row scale; one program per token."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    value = tl.load(inputs + token * stride + offsets, mask=mask, other=0.0) * tl.load(scales + token)
    scale = row_scale(tl.max(tl.abs(value), axis=0))
    tl.store(row_scales + token, scale)
    tl.store(out + token * WIDTH + offsets, (value / scale).to(tl.float16), mask=mask)


@triton.jit
def delta_key_pairs_kernel(
    rows, conv, words, state, out, NET: tl.constexpr, CONFIG: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """As `delta_pairs_kernel`, with a decay g of each key element.

    K and Q in `conv` are multiplied by e^G. To `out`: the two matrices, with sums over key elements of
    products and decays; Kj e^(G - Gj), (COUNT, HEAD_DIM), and e^G with the G of the last position. Decays are
    multiplied: no exponent is above 0, and no difference of large sums loses bits. Reads Q, K and g once,
    writes Q and K again.
    """
    DIMENSIONS: tl.constexpr = NET.dimensions
    head = tl.program_id(1)
    first = tl.program_id(0) * COUNT
    key, index = tl.arange(0, DIMENSIONS), tl.arange(0, COUNT)
    is_key = key < NET.head_dim
    pending = step_pending(words)
    total = pending + step_tokens(words)
    part = out + (tl.program_id(0) * NET.value_heads + head).to(tl.int64) * NET.pairs_width
    gate = NET.gates_at + NET.gate_width + head * NET.head_dim
    decayed = tl.zeros((COUNT, DIMENSIONS), tl.float32)
    whole = tl.full((DIMENSIONS,), 1.0, tl.float32)
    kk = tl.zeros((COUNT, COUNT), tl.float32)
    for position in range(first, tl.minimum(total, first + COUNT)):
        row = pending * 0 + position
        q_at = conv + row.to(tl.int64) * NET.channels + head * NET.head_dim + key
        k_at = q_at + NET.key_heads * NET.head_dim
        q, k = tl.load(q_at, mask=is_key, other=0.0), tl.load(k_at, mask=is_key, other=0.0)
        decay = tl.exp(load_row(rows, state, words, row - pending, gate + key, is_key, CONFIG))
        decayed = tl.where((index == row - first)[:, None], k[None, :], decayed * decay[None, :])
        whole = whole * decay
        sums = tl.sum(decayed * k[None, :], axis=1)
        kk = tl.where((index == row - first)[:, None], sums[None, :], kk)
        pair = part + COUNT * COUNT + (row - first) * COUNT + index
        tl.store(pair, tl.sum(decayed * q[None, :], axis=1))
        tl.store(q_at, q * whole, mask=is_key)
        tl.store(k_at, k * whole, mask=is_key)
    if first < total:
        token = first + index - pending
        at = NET.gates_at + head + index * 0
        beta = load_row(rows, state, words, token, at, first + index < total, CONFIG)
        store_solution(part, kk, beta, COUNT)
        part += 2 * COUNT * COUNT
        tl.store(part + index[:, None] * NET.head_dim + key[None, :], decayed, mask=is_key[None, :])
        tl.store(part + COUNT * NET.head_dim + key, whole, mask=is_key)
