"""The tokens of the largest logits of a step, so that the logits needn't be read outside."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.thread_pool import next_token
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    lanes_max,
    lanes_sum,
    load_floats,
    maximum,
    multiply,
    positive_lanes,
    splat_f32,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import store_f32, store_i64, trailing_zeros
from edgeinfer_kernels.cpu.runtime.abi import LOGITS_PER_PART
from edgeinfer_kernels.cpu.runtime.block_args import BestTokensArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

LANES = 16
ALL_LANES = (1 << LANES) - 1
LOWEST = np.float32(-1e30)
"""After the last logit of a row, to the end of its lanes."""

exports = Exports()


@device_function
def best_of_row(logits, count, scale):
    """The index of the largest of scale · logits, the first of equals; -1 if one isn't finite."""
    end = (count + LANES - 1) // LANES * LANES
    for i in range(count, end):
        store_f32(logits + 4 * i, LOWEST)
    zeros = splat_f32(np.float32(0))
    factor = splat_f32(scale)
    invalid = zeros
    top = LOWEST
    best = 0
    for first in range(0, end, LOGITS_PER_PART):
        largest = splat_f32(LOWEST)
        for i in range(first, min(end, first + LOGITS_PER_PART), LANES):
            scaled = multiply(load_floats(logits + 4 * i), factor)
            largest = maximum(largest, scaled)
            invalid = add(invalid, multiply(scaled, zeros))  # NaN of an infinite logit, too
        part_top = lanes_max(largest)
        if part_top > top:
            top = part_top
            best = first
    if lanes_sum(invalid) != np.float32(0):
        return -1
    while best < end:
        below = subtract(splat_f32(top), multiply(load_floats(logits + 4 * best), factor))
        equal = ALL_LANES ^ positive_lanes(below)
        if equal != 0:
            best += trailing_zeros(equal)
            break
        best += LANES
    return best if best < count else -1


@exports.add("best_tokens_block", BestTokensArgs, StepArgs, ThreadPoolArgs, int)
def best_tokens_block(block, step_args, pool, thread):
    """ids = argmax of scale · logits for the tokens of a step, a row on one thread. Reads the logits once."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        row = block.logits + token * block.logits_stride
        store_i64(block.ids + 8 * token, best_of_row(row, block.vocabulary, block.scale))
        token = next_token(pool, 0, tokens, token)
