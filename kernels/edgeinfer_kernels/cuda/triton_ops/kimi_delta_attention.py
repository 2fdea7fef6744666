"""The kernels of Kimi Delta Attention besides those of the gated delta net: g, and products of keys."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.gated_delta_net import softplus
from edgeinfer_kernels.cuda.triton_ops.recurrent_rows import load_row, step_pending, step_tokens
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
def delta_pairs_kernel(
    rows, conv, words, state, out, NET: tl.constexpr, CONFIG: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Σ K[i, c] K[j, c] e^(G[i, c] - G[j, c]) over the key elements c, and the same of Q and K, of COUNT
    positions of a head; to `out` (positions, heads, 2, COUNT), 0 for j > i. Program (COUNT positions, head).

    Decays are multiplied, not subtracted: a sum over many positions would lose the difference of two. Reads
    Q, K and g once.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * COUNT
    key = tl.arange(0, NET.dimensions)
    is_key = key < NET.head_dim
    index = tl.arange(0, COUNT)
    DIMENSIONS: tl.constexpr = NET.dimensions
    decayed = tl.zeros((COUNT, DIMENSIONS), tl.float32)
    pending = step_pending(words)
    total = pending + step_tokens(words)
    gate = NET.gates_at + NET.gate_width + head * NET.head_dim
    q_at = head * NET.head_dim + key
    for position in range(first, tl.minimum(total, first + COUNT)):
        row = pending * 0 + position
        line = conv + row.to(tl.int64) * NET.channels
        q = tl.load(line + q_at, mask=is_key, other=0.0)
        k = tl.load(line + NET.key_heads * NET.head_dim + q_at, mask=is_key, other=0.0)
        g = load_row(rows, state, words, row - pending, gate + key, is_key, CONFIG)
        decayed = tl.where((index == row - first)[:, None], k[None, :], decayed * tl.exp(g)[None, :])
        at = out + ((row * NET.value_heads + head) * (2 * COUNT)).to(tl.int64) + index
        tl.store(at, tl.sum(decayed * k[None, :], axis=1))
        tl.store(at + COUNT, tl.sum(decayed * q[None, :], axis=1))
