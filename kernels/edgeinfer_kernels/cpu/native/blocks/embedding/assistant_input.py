"""The input of a Gemma 4 assistant: the target's embedding of a token and a hidden state, projected."""

from edgeinfer_kernels.cpu.native.blocks.phases import first_weights, project, quantize_input
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_and_clear, barrier_prefetching
from edgeinfer_kernels.cpu.native.simd.exports import Exports
from edgeinfer_kernels.cpu.runtime.embedding_args import AssistantInputArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@exports.add("assistant_input_block", AssistantInputArgs, StepArgs, ThreadPoolArgs, int)
def assistant_input_block(block, step_args, pool, thread):
    """x ← W_pre · [e; h]; h = W_post · own if the step has a state of the assistant."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    states, own = block.states, block.own
    pre, post = block.pre, block.post
    if block.start < 0:
        quantize_input(pool, 0, step_args, own)
        ahead, end = first_weights(pool, thread, tokens, post)
        barrier_prefetching(pool, thread, ahead, end)
        target = states.floats + block.state_offset
        project(pool, 1, thread, tokens, post, own, target, states.float_stride, scratch)
        barrier_and_clear(pool, thread)
    quantize_input(pool, 2, step_args, states)
    ahead, end = first_weights(pool, thread, tokens, pre)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 3, thread, tokens, pre, states, step_args.x, step_args.x_stride, scratch)
