"""A feed-forward whose neurons are active if their gate is above a threshold, which depends on all gates."""

import math

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    next_piece,
    normalize_and_quantize,
    project,
    project_residual,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    at_least,
    lanes_sum,
    load_floats,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import activate_gated
from edgeinfer_kernels.cpu.runtime.gemma3n_args import GaussianFeedForwardArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def threshold(row, count, deviations):
    """mean + deviations · standard deviation of `count` floats."""
    whole = count // 16 * 16
    total = splat_f32(np.float32(0))
    for i in range(0, whole, 16):
        total = add(total, load_floats(row + 4 * i))
    rest = np.float32(0)
    for i in range(whole, count):
        rest += load_f32(row + 4 * i)
    mean = (lanes_sum(total) + rest) / np.float32(count)
    center = splat_f32(mean)
    squares = splat_f32(np.float32(0))
    for i in range(0, whole, 16):
        difference = subtract(load_floats(row + 4 * i), center)
        squares = multiply_add(difference, difference, squares)
    rest = np.float32(0)
    for i in range(whole, count):
        difference = load_f32(row + 4 * i) - mean
        rest += difference * difference
    variance = (lanes_sum(squares) + rest) / np.float32(count - 1)
    return np.float32(mean + deviations * np.float32(math.sqrt(variance)))


@device_function
def write_thresholds(pool, counter, thread, block, tokens):
    """Phase: the threshold of each token's gates."""
    token = thread
    while token < tokens:
        row = block.gate + token * block.hidden.float_stride
        value = threshold(row, block.gate_matrix.rows, block.deviations)
        store_f32(block.thresholds + token * block.threshold_stride, value)
        token = next_token(pool, counter, tokens, token)


@device_function
def activate_above(pool, counter, block, tokens):
    """Phase: hidden = activation(max(0, gate - threshold))·up, in the input format of W_down; in pieces."""
    hidden = block.hidden
    code = block.activation
    while True:
        token, first, last = next_piece(pool, counter, hidden.columns)
        if token >= tokens:
            break
        up = hidden.floats + token * hidden.float_stride
        gate = block.gate + token * hidden.float_stride
        least = splat_f32(load_f32(block.thresholds + token * block.threshold_stride))
        for i in range(first, last, 16):
            above = at_least(subtract(load_floats(gate + 4 * i), least), np.float32(0))
            store_floats(up + 4 * i, activate_gated(code, above, load_floats(up + 4 * i)))
        write_activations(up, hidden, token, tokens, first, last)


@exports.add("gaussian_feed_forward_block", GaussianFeedForwardArgs, StepArgs, ThreadPoolArgs, int)
def gaussian_feed_forward_block(block, step_args, pool, thread):
    """x += scale · norm(W_down · (activation(max(0, g - threshold)) · W_up·norm(x))), g = W_gate·norm(x), for
    the tokens of a step.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    normed, hidden = block.normed, block.hidden
    gate_matrix, up_matrix, down = block.gate_matrix, block.up_matrix, block.down_matrix
    stride = hidden.float_stride
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, gate_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, gate_matrix, normed, block.gate, stride, scratch)
    project(pool, 2, thread, tokens, up_matrix, normed, hidden.floats, stride, scratch)
    barrier(pool, thread)
    ahead, end = first_weights(pool, thread, tokens, down)
    write_thresholds(pool, 3, thread, block, tokens)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    activate_above(pool, 4, block, tokens)
    barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 5, thread, step_args, block, down, hidden, scratch)
