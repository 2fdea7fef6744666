"""The convolutions of a block drafter over the tokens of a step, before and after a block of a layer."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.phases import first_weights, normalize_and_quantize, project
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.runtime.embedding_args import ConvolutionArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()
LANES = 16
BEFORE, AFTER = 0, 1


@device_function
def convolved(block, side, token, rows, stride, i):
    """Elements i… of a token's convolution of rows: Σ over taps of (factor + base) · the row `tap` before."""
    taps, width = block.taps, block.width
    groups = width // block.group_size
    factors = (
        block.factors + token * block.factors_stride + 4 * (side * taps * groups + i // block.group_size)
    )
    base = block.base + 4 * (side * taps * width + i)
    total = splat_f32(np.float32(0))
    for tap in range(min(taps, token + 1)):
        weight = add(splat_f32(load_f32(factors + 4 * tap * groups)), load_floats(base + 4 * tap * width))
        total = multiply_add(weight, load_floats(rows + (token - tap) * stride + 4 * i), total)
    return total


@device_function
def convolve_input(pool, counter, thread, block, step_args):
    """Phase: x ← the convolution of the normed rows; it is kept, and x before."""
    tokens = step_args.tokens
    rows = block.rows
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        residual = block.residual + token * block.residual_stride
        kept = block.convolved + token * block.convolved_stride
        for i in range(0, block.width, LANES):
            result = convolved(block, BEFORE, token, rows.floats, rows.float_stride, i)
            store_floats(residual + 4 * i, load_floats(x + 4 * i))
            store_floats(kept + 4 * i, result)
            store_floats(x + 4 * i, result)
        token = next_token(pool, counter, tokens, token)


@device_function
def take_added(pool, counter, thread, block, step_args):
    """Phase: the kept rows ← x minus them, what the block between the convolutions has added."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        kept = block.convolved + token * block.convolved_stride
        for i in range(0, block.width, LANES):
            store_floats(kept + 4 * i, subtract(load_floats(x + 4 * i), load_floats(kept + 4 * i)))
        token = next_token(pool, counter, tokens, token)


@device_function
def convolve_result(pool, counter, thread, block, step_args):
    """Phase: x ← the residual plus the convolution of the kept rows."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        residual = block.residual + token * block.residual_stride
        for i in range(0, block.width, LANES):
            result = convolved(block, AFTER, token, block.convolved, block.convolved_stride, i)
            store_floats(x + 4 * i, add(load_floats(residual + 4 * i), result))
        token = next_token(pool, counter, tokens, token)


@exports.add("convolved_input_block", ConvolutionArgs, StepArgs, ThreadPoolArgs, int)
def convolved_input_block(block, step_args, pool, thread):
    """x ← the convolution of norm(x), whose factors are W · norm(x)."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    matrix = block.projection
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.rows)
    ahead, end = first_weights(pool, thread, tokens, matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, matrix, block.rows, block.factors, block.factors_stride, scratch)
    barrier_and_clear(pool, thread)
    convolve_input(pool, 2, thread, block, step_args)


@exports.add("convolved_result_block", ConvolutionArgs, StepArgs, ThreadPoolArgs, int)
def convolved_result_block(block, step_args, pool, thread):
    """x ← the residual plus the convolution of what the block before has added."""
    take_added(pool, 0, thread, block, step_args)
    barrier_and_clear(pool, thread)
    convolve_result(pool, 1, thread, block, step_args)
