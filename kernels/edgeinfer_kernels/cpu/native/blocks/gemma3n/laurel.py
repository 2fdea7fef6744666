"""Laurel: a low-rank projection of the normed rows that attention reads."""

from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    normalize,
    normalize_and_quantize,
    project,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.runtime.gemma3n_args import LaurelArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def add_scaled(pool, counter, thread, block, step_args):
    """Phase: x ← scale · (x + h + norm(projected))."""
    tokens = step_args.tokens
    normed, post_norm = block.normed, block.post_norm
    scale = splat_f32(block.scale)
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        h = normed.floats + token * normed.float_stride
        row = block.projected + token * block.projected_stride
        normalize(post_norm, row, row)
        for i in range(0, post_norm.padded, 16):
            value = add(load_floats(h + 4 * i), load_floats(row + 4 * i))
            store_floats(x + 4 * i, multiply(add(load_floats(x + 4 * i), value), scale))
        token = next_token(pool, counter, tokens, token)


@exports.add("laurel_block", LaurelArgs, StepArgs, ThreadPoolArgs, int)
def laurel_block(block, step_args, pool, thread):
    """x ← scale · (x + h + norm(R · L · h)) for the tokens of a step, whose normed rows h attention wrote."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    left, hidden, right = block.left, block.hidden, block.right
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
    ahead, end = first_weights(pool, thread, tokens, left)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, left, block.normed, hidden.floats, hidden.float_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, right)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    quantize_input(pool, 2, step_args, hidden)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 3, thread, tokens, right, hidden, block.projected, block.projected_stride, scratch)
    barrier_and_clear(pool, thread)
    add_scaled(pool, 4, thread, block, step_args)
