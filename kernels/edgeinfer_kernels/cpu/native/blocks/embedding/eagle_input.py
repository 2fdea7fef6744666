"""The input of an EAGLE-3 head: hidden states of the target, fused, and the embedding of a token."""

from edgeinfer_kernels.cpu.native.blocks.phases import first_weights, normalize, project
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import load_floats, store_floats
from edgeinfer_kernels.cpu.runtime.embedding_args import EagleInputArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def write_features(pool, counter, thread, block, tokens):
    """Phase: every token's target states, normalized if the head does that, in the projection's format."""
    features = block.features
    token = thread
    while token < tokens:
        row = features.floats + token * features.float_stride
        normalize(block.feature_norm, row, row)
        write_activations(row, features, token, tokens, 0, features.columns)
        token = next_token(pool, counter, tokens, token)


@device_function
def write_pairs(pool, counter, thread, block, step_args):
    """Phase: every token's [norm(x); norm(g)], in the input format of attention; x ← g or norm(g)."""
    tokens = step_args.tokens
    pair = block.pair
    columns = block.hnorm.padded
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        row = pair.floats + token * pair.float_stride
        state = block.own + token * block.own_stride
        normalize(block.enorm, x, row)
        normalize(block.hnorm, state, row + block.state_offset)
        if block.norm_before_residual != 0:
            state = row + block.state_offset
        for i in range(0, columns, 16):
            store_floats(x + 4 * i, load_floats(state + 4 * i))
        write_activations(row, pair, token, tokens, 0, pair.columns)
        token = next_token(pool, counter, tokens, token)


@exports.add("eagle_input_block", EagleInputArgs, StepArgs, ThreadPoolArgs, int)
def eagle_input_block(block, step_args, pool, thread):
    """g = W_fc · norm(h) unless the step has states of the head; x ← g and the pair [norm(x); norm(g)]."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    if step_args.start <= block.start:
        matrix = block.fc
        write_features(pool, 0, thread, block, tokens)
        ahead, end = first_weights(pool, thread, tokens, matrix)
        barrier_prefetching(pool, thread, ahead, end)
        project(pool, 1, thread, tokens, matrix, block.features, block.own, block.own_stride, scratch)
        barrier_and_clear(pool, thread)
    write_pairs(pool, 2, thread, block, step_args)
