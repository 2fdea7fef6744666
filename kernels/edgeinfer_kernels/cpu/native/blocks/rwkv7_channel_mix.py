"""The channel mixing of RWKV-7."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.common.recurrent_rows import (
    keep_rows,
    mix_piece,
    normalize_rows,
)
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    next_piece,
    project,
    project_residual,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_prefetching,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    at_least,
    load_floats,
    multiply,
    store_floats,
)
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import (
    Rwkv7ChannelMixArgs,
)

exports = Exports()


@device_function
def square_hidden(pool, counter, block, tokens):
    """Phase: relu(hidden)², in the input formats of W_v, in pieces."""
    hidden = block.hidden
    columns = hidden.columns
    while True:
        token, first, last = next_piece(pool, counter, columns)
        if token >= tokens:
            break
        row = hidden.floats + token * hidden.float_stride
        for i in range(first, last, 16):
            value = at_least(load_floats(row + 4 * i), np.float32(0))
            store_floats(row + 4 * i, multiply(value, value))
        write_activations(row, hidden, token, tokens, first, last)


@exports.add("rwkv7_channel_mix_block", Rwkv7ChannelMixArgs, StepArgs, ThreadPoolArgs, int)
def rwkv7_channel_mix_block(block, step_args, pool, thread):
    """x += scale · norm(W_v relu(W_k (h + μ (h₋₁ - h)))²), with h = norm(x), for the tokens of `step_args`;
    h is written to the state.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    state, mixed, hidden = block.state, block.mixed_k, block.hidden
    key, value = block.key_matrix, block.value_matrix
    columns = mixed.columns
    normalize_rows(pool, 0, thread, step_args, block.norm, state)
    ahead, end = first_weights(pool, thread, tokens, key)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    while True:
        token, first, last = next_piece(pool, 1, columns)
        if token >= tokens:
            break
        mix_piece(state, step_args, block.lerp, mixed, token, first, last)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 2, thread, tokens, key, mixed, hidden.floats, hidden.float_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, value)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    keep_rows(pool, 3, state, step_args)
    square_hidden(pool, 4, block, tokens)
    barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 5, thread, step_args, block, value, hidden, scratch)
