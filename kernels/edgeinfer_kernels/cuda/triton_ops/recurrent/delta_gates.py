"""The kernels of the gated norm after the delta rule: the last ones of a block besides its projection."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import keep_piece
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def _gated_head(values, z, scale, gain, epsilon, token, stride, head, dimension, mask, NET: tl.constexpr):
    """norm(o) · silu(z) of one head, or norm(o) · sigmoid(z)."""
    at = token * (NET.value_heads * NET.head_dim) + head * NET.head_dim + dimension
    value = tl.load(values + at, mask=mask, other=0.0)
    square = tl.sum(value * value, axis=0) / NET.head_dim
    normed = value / tl.sqrt(square + epsilon) * gain
    gate = tl.load(z + token * stride + head * NET.head_dim + dimension, mask=mask, other=0.0) * scale
    if NET.silu_gate:
        normed = normed * gate
    return normed * sigmoid(gate)


@triton.jit
def gate_step_kernel(
    values, z, stride, weight, epsilon, out, rows, words, state, count, NET: tl.constexpr,
    CONFIG: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = `_gated_head` of a decode step, as activations, or as floats without OUT; and what
    `keep_rows_kernel` writes.

    Program: a value head of each of `count` tokens, then a row and BLOCK columns of it; in a batch
    (…, 1, sequence).
    """
    GROUPS: tl.constexpr = NET.dimensions // 16
    USED: tl.constexpr = NET.value_heads * (NET.head_dim // 16)
    release_consumers(DEPENDENT)
    item, gated = tl.program_id(0), count * NET.value_heads
    if item < gated:
        token, head = (item // NET.value_heads).to(tl.int64), item % NET.value_heads
        if CONFIG.is_batch:
            token += tl.program_id(2)
        dimension = tl.arange(0, NET.dimensions)
        mask = dimension < NET.head_dim
        gain = tl.load(weight + dimension, mask=mask, other=0.0)
        wait_for_producers(DEPENDENT)
        y = _gated_head(values, z, 1.0, gain, epsilon, token, stride, head, dimension, mask, NET)
        if OUT is None:
            at = token * (NET.value_heads * NET.head_dim) + head * NET.head_dim + dimension
            tl.store(out + at, y, mask=mask)
        else:
            group = tl.arange(0, GROUPS)
            own, inside = head * (NET.head_dim // 16) + group, group < NET.head_dim // 16
            quantize(tl.reshape(y, (GROUPS, 16)), out, own, inside, OUT, token)
            PADDING: tl.constexpr = triton.next_power_of_2(2 * OUT.blocks - USED)
            if PADDING > 0:
                padding = USED + tl.arange(0, PADDING)
                is_padding = (padding < 2 * OUT.blocks) & (head == NET.value_heads - 1)
                quantize(tl.zeros((PADDING, 16), tl.float32), out, padding, is_padding, OUT, token)
    else:
        PIECES: tl.constexpr = triton.cdiv(CONFIG.row_width, BLOCK)
        row, piece = (item - gated) // PIECES, (item - gated) % PIECES
        keep_piece(rows, words, state, count, row, piece, CONFIG, BLOCK, DEPENDENT)


@triton.jit
def gate_chunk_kernel(values, z, scales, stride, weight, epsilon, out, row_scales, NET: tl.constexpr):
    """out = `_gated_head` / row scale of a chunk, float16; one program per token.

    Written with scale 1 first; a row that needs another scale is computed again.
    """
    DIMENSIONS: tl.constexpr = NET.dimensions
    token = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DIMENSIONS)
    mask = dimension < NET.head_dim
    gain = tl.load(weight + dimension, mask=mask, other=0.0)
    z_scale = tl.load(scales + token)
    to = out + token * (NET.value_heads * NET.head_dim) + dimension
    largest = tl.zeros((DIMENSIONS,), tl.float32)
    for head in range(NET.value_heads):
        y = _gated_head(values, z, z_scale, gain, epsilon, token, stride, head, dimension, mask, NET)
        largest = tl.maximum(largest, tl.abs(y))
        tl.store(to + head * NET.head_dim, y.to(tl.float16), mask=mask)
    scale = row_scale(tl.max(largest, axis=0))
    tl.store(row_scales + token, scale)
    if scale > 1.0:
        for head in range(NET.value_heads):
            y = _gated_head(values, z, z_scale, gain, epsilon, token, stride, head, dimension, mask, NET)
            tl.store(to + head * NET.head_dim, (y / scale).to(tl.float16), mask=mask)
