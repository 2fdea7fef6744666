"""The kernels of the gated short convolution, for decode steps and for chunks of a prompt."""

import triton
import triton.language as tl

from edgeinfer_kernels.cpu.runtime.abi import CHECKPOINT_POSITIONS, RING_ROWS
from edgeinfer_kernels.cuda.prefill.prefill_rows import store_scaled_pieces
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers

RING = tl.constexpr(RING_ROWS)
BETWEEN = tl.constexpr(CHECKPOINT_POSITIONS)


@triton.jit
def product_row(inputs, scales, token, offsets, mask, X_AT: tl.constexpr, SCALED: tl.constexpr):
    """b · x of a token; `inputs`: the row of its projections, with b at 0 and x at X_AT."""
    product = tl.load(inputs + offsets, mask=mask, other=0.0) * tl.load(
        inputs + X_AT + offsets, mask=mask, other=0.0
    )
    if SCALED:
        scale = tl.load(scales + token)
        product = product * scale * scale
    return product


@triton.jit
def gated_sum(
    offsets, mask, inputs, scales, ring, taps, token, start, stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, C_AT: tl.constexpr, X_AT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """c · Σ taps · (b · x) of a token. Rows before the step are in the ring; before position 0 they are 0."""
    total = tl.zeros(offsets.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        other = token + tap - (TAPS - 1)
        here, kept = mask & (other >= 0), mask & (other < 0) & (start + other >= 0)
        at = tl.maximum(other, 0)
        row = product_row(inputs + at * stride, scales, at, offsets, here, X_AT, SCALED)
        slot = (start + other + RING) % RING
        row += tl.load(ring + slot * WIDTH + offsets, mask=kept, other=0.0)
        total += tl.load(taps + tap * WIDTH + offsets, mask=mask, other=0.0) * row
    gate = tl.load(inputs + token * stride + C_AT + offsets, mask=mask, other=0.0)
    if SCALED:
        gate = gate * tl.load(scales + token)
    return gate * total


@triton.jit
def keep_row(
    row, ring, checkpoints, position, count, offsets, mask, in_ring,
    WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write b · x of a position to the ring if `in_ring`, and before a checkpoint there."""
    tl.store(ring + position % RING * WIDTH + offsets, row, mask=mask & in_ring)
    number = position // BETWEEN
    left = (number + 1) * BETWEEN - 1 - position
    is_kept = (left < TAPS - 1) & (number < count)
    kept = number * (TAPS - 1) + TAPS - 2 - left
    tl.store(checkpoints + kept * WIDTH + offsets, row, mask=mask & is_kept)


@triton.jit
def step_convolution_kernel(
    inputs, stride, state, ring, checkpoints, count, taps, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, C_AT: tl.constexpr, X_AT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = c · Σ taps · (b · x) of the tokens of a decode step; b · x is kept.

    One program per token and BLOCK channels. Reads at most 8·TAPS + 4 bytes per channel, writes 8.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    start = tl.load(state + 8)
    y = gated_sum(
        offsets, mask, inputs, inputs, ring, taps, token, start, stride, WIDTH, TAPS, C_AT, X_AT, False
    )
    tl.store(out + token * WIDTH + offsets, y, mask=mask)
    row = product_row(inputs + token * stride, inputs, token, offsets, mask, X_AT, False)
    keep_row(row, ring, checkpoints, start + token, count, offsets, mask, token >= 0, WIDTH, TAPS)


@triton.jit
def chunk_convolution_kernel(
    inputs, scales, stride, start, ring, taps, out, row_scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """out = c · Σ taps · (b · x) / row scale of the tokens of a chunk, float16; one program per token.

    Reads at most 8·TAPS + 4 bytes per channel, twice if the row needs a scale; writes 2.
    """
    token = tl.program_id(0)
    store_scaled_pieces(
        out, row_scales, token.to(tl.int64), gated_sum,
        (inputs, scales, ring, taps, token, start, stride, WIDTH, TAPS, WIDTH, 2 * WIDTH, True), WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def chunk_rows_kernel(
    inputs, scales, stride, start, tokens, ring, checkpoints, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Keep b · x of the tokens of a chunk; one program per token and BLOCK channels. It runs after
    `chunk_convolution_kernel`, which reads the earlier rows.
    """
    token = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    row = product_row(inputs + token * stride, scales, token, offsets, mask, 2 * WIDTH, True)
    in_ring = token >= tokens - RING
    keep_row(row, ring, checkpoints, start + token, count, offsets, mask, in_ring, WIDTH, TAPS)
