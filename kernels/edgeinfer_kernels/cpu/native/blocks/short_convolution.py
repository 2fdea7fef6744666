"""The gated short convolution block."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.common.recurrent_rows import (
    earlier,
    keep_rows,
    row_address,
    row_lanes,
    step_of,
)
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    next_piece,
    normalize_and_quantize,
    project,
    project_residual,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_prefetching
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import ShortConvolutionArgs

exports = Exports()


@device_function
def tap_value(block, step_args, token, offset):
    """Sixteen values of b · x of a token of a sequence's step, at a byte offset; tokens below its `first`
    precede it.
    """
    if token >= step_args.first:
        at = token * block.row_stride + offset
        b = load_floats(block.b + at)
        return multiply(b, load_floats(block.x + at))
    return row_lanes(row_address(block.state, step_args, token), offset)


@device_function
def convolve(pool, counter, block, step_args):
    """Phase: conv_out = c · Σ taps · (b · x), in the input format of the last projection, in pieces; b · x is
    written to the rows of the state.
    """
    conv_out, state = block.conv_out, block.state
    columns = block.channels
    taps = block.taps
    weights = block.weights
    tokens = step_args.tokens
    tail_bytes = state.tail_bytes
    while True:
        token, first, last = next_piece(pool, counter, columns)
        if token >= tokens:
            break
        gate = block.c + token * block.row_stride
        row = conv_out.floats + token * conv_out.float_stride
        own = step_of(step_args, token)
        kept = row_address(state, own, token)
        for i in range(first, last, 16):
            value = splat_f32(np.float32(0))
            for tap in range(taps):
                weight = load_floats(weights + tap * tail_bytes + 4 * i)
                product = tap_value(block, own, earlier(own, token, taps - 1 - tap), 4 * i)
                value = multiply_add(weight, product, value)
            store_floats(row + 4 * i, multiply(load_floats(gate + 4 * i), value))
            store_floats(kept + 4 * i, tap_value(block, own, token, 4 * i))
        write_activations(row, conv_out, token, tokens, first, last)


@exports.add("short_convolution_block", ShortConvolutionArgs, StepArgs, ThreadPoolArgs, int)
def short_convolution_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · (c · conv(b · x'))), with b, c, x' = W_in · norm(x), for the tokens of
    `step_args`; b · x' is written to the state.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    normed, output = block.normed, block.output_matrix
    b_matrix, c_matrix, x_matrix = block.b_matrix, block.c_matrix, block.x_matrix
    row_stride = block.row_stride
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, b_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, b_matrix, normed, block.b, row_stride, scratch)
    project(pool, 2, thread, tokens, c_matrix, normed, block.c, row_stride, scratch)
    project(pool, 3, thread, tokens, x_matrix, normed, block.x, row_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    convolve(pool, 4, block, step_args)
    barrier_prefetching(pool, thread, ahead, end)
    keep_rows(pool, 5, block.state, step_args)
    project_residual(pool, 6, thread, step_args, block, block.output_matrix, block.conv_out, scratch)
