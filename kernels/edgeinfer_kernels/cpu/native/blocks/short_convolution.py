"""The gated short convolution block."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_residual,
    first_weights,
    next_piece,
    normalize_and_quantize,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_asking, barrier_between, next_item
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, inner
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.runtime.abi import CHECKPOINT_POSITIONS, RING_ROWS
from edgeinfer_kernels.cpu.runtime.block_args import ShortConvolutionArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@inner
def product_of(block, token, offset):
    """Sixteen values of b · x of a token of this step, at a byte offset in its rows."""
    at = token * block.row_stride + offset
    b = load_floats(block.b + at)
    return multiply(b, load_floats(block.x + at))


@inner
def tap_value(block, start, token, offset):
    """As `product_of`; for a token before this step (negative) from the ring, and 0 before position 0."""
    if token >= 0:
        return product_of(block, token, offset)
    if start + token < 0:
        return splat_f32(np.float32(0))
    row = (start + token) % RING_ROWS
    ring = block.ring
    return load_floats(ring + row * block.row_bytes + offset)


@inner
def convolve(team, counter, block, tokens, start):
    """Phase: mixed = c · Σ taps · (b · x), in the input format of the last projection; in pieces."""
    mixed = block.mixed
    columns = block.channels
    taps = block.taps
    weights = block.weights
    row_bytes = block.row_bytes
    while True:
        token, first, last = next_piece(team, counter, columns)
        if token >= tokens:
            break
        gate = block.c + token * block.row_stride
        row = mixed.floats + token * mixed.float_stride
        for i in range(first, last, 16):
            value = splat_f32(np.float32(0))
            for tap in range(taps):
                weight = load_floats(weights + tap * row_bytes + 4 * i)
                before = tap_value(block, start, token - taps + 1 + tap, 4 * i)
                value = multiply_add(weight, before, value)
            store_floats(row + 4 * i, multiply(load_floats(gate + 4 * i), value))
        write_activations(row, mixed, token, tokens, first, last)


@inner
def keep_row(block, token, target):
    """Write b · x of a token to a row."""
    for offset in range(0, block.row_bytes, 64):
        store_floats(target + offset, product_of(block, token, offset))


@inner
def keep_rows(team, counter, block, tokens, start):
    """Phase: write b · x to the ring, for as many last tokens as it has rows, and before checkpoints."""
    row_bytes = block.row_bytes
    ring = block.ring
    checkpoints = block.checkpoints
    rows = block.taps - 1
    while True:
        token = next_item(team, counter)
        if token >= tokens:
            break
        if token >= tokens - RING_ROWS:
            keep_row(block, token, ring + (start + token) % RING_ROWS * row_bytes)
        number = (start + token) // CHECKPOINT_POSITIONS
        left = (number + 1) * CHECKPOINT_POSITIONS - 1 - start - token
        if left < rows and number < block.checkpoint_count:
            keep_row(block, token, checkpoints + (number * rows + rows - 1 - left) * row_bytes)


@exports.add("short_convolution_block", ShortConvolutionArgs, StepArgs, ThreadPoolArgs, int)
def short_convolution_block(block, call, team, thread):
    """x += scale · norm(W_out · (c · conv(b · x'))), with b, c, x' = W_in · norm(x), for the tokens of
    `call`; b · x' is written to the recent rows.
    """
    tokens = call.tokens
    start = call.start
    scratch = block.scratch
    scratch += thread * block.scratch_stride
    normed = block.normed
    mixed = block.mixed
    output = block.output_matrix
    b_matrix = block.b_matrix
    c_matrix = block.c_matrix
    x_matrix = block.x_matrix
    row_stride = block.row_stride
    projected = block.projected
    stride = block.projected_stride
    normalize_and_quantize(team, 0, thread, call, block.norm, normed)
    ahead, end = first_weights(team, thread, tokens, b_matrix)
    barrier_asking(team, ahead, end)
    b, c = block.b, block.c
    x = block.x
    project(team, 1, thread, tokens, b_matrix, normed, b, row_stride, scratch)
    project(team, 2, thread, tokens, c_matrix, normed, c, row_stride, scratch)
    project(team, 3, thread, tokens, x_matrix, normed, x, row_stride, scratch)
    ahead, end = first_weights(team, thread, tokens, output)
    ahead = barrier_asking(team, ahead, end)
    convolve(team, 4, block, tokens, start)
    barrier_asking(team, ahead, end)
    keep_rows(team, 5, block, tokens, start)
    project(team, 6, thread, tokens, output, mixed, projected, stride, scratch)
    barrier_between(team)
    scale = block.residual_scale
    post_norm = block.post_norm
    add_residual(team, 7, thread, call, output, projected, stride, post_norm, scale)
