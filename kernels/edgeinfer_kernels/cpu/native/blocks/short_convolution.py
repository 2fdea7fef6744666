"""The gated short convolution block."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_residual,
    first_weights,
    next_piece,
    normalize_and_quantize,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_and_clear, barrier_prefetching, next_item
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
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


@device_function
def product_of(block, token, offset):
    """Sixteen values of b · x of a token of this step, at a byte offset in its rows."""
    at = token * block.row_stride + offset
    b = load_floats(block.b + at)
    return multiply(b, load_floats(block.x + at))


@device_function
def tap_value(block, start, token, offset):
    """As `product_of`; for a token before this step (negative) from the ring, and 0 before position 0."""
    if token >= 0:
        return product_of(block, token, offset)
    if start + token < 0:
        return splat_f32(np.float32(0))
    row = (start + token) % RING_ROWS
    ring = block.ring
    return load_floats(ring + row * block.row_bytes + offset)


@device_function
def convolve(pool, counter, block, tokens, start):
    """Phase: conv_out = c · Σ taps · (b · x), in the input format of the last projection; in pieces."""
    conv_out = block.conv_out
    columns = block.channels
    taps = block.taps
    weights = block.weights
    row_bytes = block.row_bytes
    while True:
        token, first, last = next_piece(pool, counter, columns)
        if token >= tokens:
            break
        gate = block.c + token * block.row_stride
        row = conv_out.floats + token * conv_out.float_stride
        for i in range(first, last, 16):
            value = splat_f32(np.float32(0))
            for tap in range(taps):
                weight = load_floats(weights + tap * row_bytes + 4 * i)
                before = tap_value(block, start, token - taps + 1 + tap, 4 * i)
                value = multiply_add(weight, before, value)
            store_floats(row + 4 * i, multiply(load_floats(gate + 4 * i), value))
        write_activations(row, conv_out, token, tokens, first, last)


@device_function
def keep_row(block, token, target):
    """Write b · x of a token to a row."""
    for offset in range(0, block.row_bytes, 64):
        store_floats(target + offset, product_of(block, token, offset))


@device_function
def keep_rows(pool, counter, block, tokens, start):
    """Phase: write b · x to the ring, for as many last tokens as it has rows, and before checkpoints."""
    row_bytes = block.row_bytes
    ring = block.ring
    checkpoints = block.checkpoints
    rows = block.taps - 1
    while True:
        token = next_item(pool, counter)
        if token >= tokens:
            break
        if token >= tokens - RING_ROWS:
            keep_row(block, token, ring + (start + token) % RING_ROWS * row_bytes)
        number = (start + token) // CHECKPOINT_POSITIONS
        left = (number + 1) * CHECKPOINT_POSITIONS - 1 - start - token
        if left < rows and number < block.checkpoint_count:
            keep_row(block, token, checkpoints + (number * rows + rows - 1 - left) * row_bytes)


@exports.add("short_convolution_block", ShortConvolutionArgs, StepArgs, ThreadPoolArgs, int)
def short_convolution_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · (c · conv(b · x'))), with b, c, x' = W_in · norm(x), for the tokens of
    `step_args`; b · x' is written to the recent rows.
    """
    tokens = step_args.tokens
    start = step_args.start
    scratch = block.scratch
    scratch += thread * block.scratch_stride
    normed, conv_out, output = block.normed, block.conv_out, block.output_matrix
    b_matrix, c_matrix, x_matrix = block.b_matrix, block.c_matrix, block.x_matrix
    row_stride, projected, stride = block.row_stride, block.projected, block.projected_stride
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, b_matrix)
    barrier_prefetching(pool, ahead, end)
    project(pool, 1, thread, tokens, b_matrix, normed, block.b, row_stride, scratch)
    project(pool, 2, thread, tokens, c_matrix, normed, block.c, row_stride, scratch)
    project(pool, 3, thread, tokens, x_matrix, normed, block.x, row_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, ahead, end)
    convolve(pool, 4, block, tokens, start)
    barrier_prefetching(pool, ahead, end)
    keep_rows(pool, 5, block, tokens, start)
    project(pool, 6, thread, tokens, output, conv_out, projected, stride, scratch)
    barrier_and_clear(pool)
    add_residual(pool, 7, thread, step_args, output, projected, stride, block.post_norm, block.residual_scale)
