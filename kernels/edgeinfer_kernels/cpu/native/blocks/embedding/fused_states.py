"""The hidden states of a target after some of its layers, fused by one matrix."""

from edgeinfer_kernels.cpu.native.blocks.phases import first_weights, normalize, project
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.runtime.embedding_args import FusedStatesArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def write_states(pool, counter, thread, block, tokens):
    """Phase: every token's states in the input format of the projection."""
    features = block.features
    token = thread
    while token < tokens:
        row = features.floats + token * features.float_stride
        write_activations(row, features, token, tokens, 0, features.columns)
        token = next_token(pool, counter, tokens, token)


@device_function
def normalize_products(pool, counter, thread, block, step_args):
    """Phase: x ← norm(x)."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        normalize(block.norm, x, x)
        token = next_token(pool, counter, tokens, token)


@exports.add("fused_states_block", FusedStatesArgs, StepArgs, ThreadPoolArgs, int)
def fused_states_block(block, step_args, pool, thread):
    """x ← norm(W_fc · h) for the tokens of `step_args`."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    matrix = block.fc
    write_states(pool, 0, thread, block, tokens)
    ahead, end = first_weights(pool, thread, tokens, matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, matrix, block.features, step_args.x, step_args.x_stride, scratch)
    barrier_and_clear(pool, thread)
    normalize_products(pool, 2, thread, block, step_args)
