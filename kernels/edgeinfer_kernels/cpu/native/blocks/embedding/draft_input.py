"""The input of a draft head: the embedding of a token and a hidden state of the target, projected."""

from edgeinfer_kernels.cpu.native.blocks.phases import first_weights, normalize, project
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.runtime.embedding_args import DraftInputArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def write_pairs(pool, counter, thread, block, step_args):
    """Phase: every token's [norm(x); norm(h)], in the input format of the projection."""
    tokens = step_args.tokens
    pair = block.pair
    is_own = step_args.start > block.start
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        row = pair.floats + token * pair.float_stride
        state = block.states + token * block.states_stride
        if is_own:
            state = block.own
        normalize(block.enorm, x, row)
        normalize(block.hnorm, state, row + block.state_offset)
        write_activations(row, pair, token, tokens, 0, pair.columns)
        token = next_token(pool, counter, tokens, token)


@exports.add("draft_input_block", DraftInputArgs, StepArgs, ThreadPoolArgs, int)
def draft_input_block(block, step_args, pool, thread):
    """x ← W · [norm(x); norm(h)] for the tokens of a step. No thread reads x once its pair is written."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    matrix = block.eh_proj
    write_pairs(pool, 0, thread, block, step_args)
    ahead, end = first_weights(pool, thread, tokens, matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, matrix, block.pair, step_args.x, step_args.x_stride, scratch)
    barrier_and_clear(pool, thread)
