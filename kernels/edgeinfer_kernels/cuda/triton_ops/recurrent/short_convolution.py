"""The kernels of the gated short convolution, for decode steps and for chunks of a prompt."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import store_scaled_pieces
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import earlier_token, load_row
from edgeinfer_kernels.cuda.triton_ops.step_words import own_row, own_words
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


@triton.jit
def product_rows_kernel(
    inputs, scales, stride, rows,
    WIDTH: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, X_AT: tl.constexpr, SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rows = b · x of the step's tokens; `inputs`: rows of the projections, with b at 0 and x at X_AT.

    One program per token and BLOCK channels. Reads 8 bytes per channel, writes 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    row = inputs + token * stride + offsets
    product = tl.load(row, mask=mask, other=0.0) * tl.load(row + X_AT, mask=mask, other=0.0)
    if SCALED:
        scale = tl.load(scales + token)
        product = product * scale * scale
    tl.store(rows + token * ROW + offsets, product, mask=offsets < ROW)


@triton.jit
def gated_sum(
    offsets, mask, inputs, scales, stride, rows, state, words, taps, token,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, CONFIG: tl.constexpr, C_AT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """c · Σ taps · (b · x) of a token."""
    total = tl.zeros(offsets.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        row = load_row(
            rows, state, words, earlier_token(words, token, TAPS - 1 - tap, CONFIG), offsets, mask, CONFIG
        )
        total += tl.load(taps + tap * WIDTH + offsets, mask=mask, other=0.0) * row
    gate = tl.load(inputs + token * stride + C_AT + offsets, mask=mask, other=0.0)
    if SCALED:
        gate = gate * tl.load(scales + token)
    return gate * total


@triton.jit
def step_convolution_kernel(
    inputs, stride, rows, words, state, taps, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, CONFIG: tl.constexpr, C_AT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = c · Σ taps · (b · x) of the tokens of a decode step.

    Program (BLOCK channels, token), in a batch (BLOCK channels, 0, sequence). Reads at most 4·TAPS + 4 bytes
    per channel, writes 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    words, inputs = own_words(words, CONFIG.is_batch), own_row(inputs, stride, CONFIG.is_batch)
    rows, out = own_row(rows, CONFIG.row_width, CONFIG.is_batch), own_row(out, WIDTH, CONFIG.is_batch)
    token = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    y = gated_sum(
        offsets, mask, inputs, inputs, stride, rows, state, words, taps, token,
        WIDTH, TAPS, CONFIG, C_AT, False,
    )  # fmt: skip
    tl.store(out + token * WIDTH + offsets, y, mask=mask)


@triton.jit
def chunk_convolution_kernel(
    inputs, scales, stride, rows, words, state, taps, out, row_scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """out = c · Σ taps · (b · x) / row scale of the tokens of a chunk, float16; one program per token.

    Reads at most 4·TAPS + 4 bytes per channel, twice if the row needs a scale; writes 2.
    """
    token = tl.program_id(0)
    store_scaled_pieces(
        out, row_scales, token.to(tl.int64), gated_sum,
        (inputs, scales, stride, rows, state, words, taps, token, WIDTH, TAPS, CONFIG, WIDTH, True), WIDTH,
        BLOCK,
    )  # fmt: skip
