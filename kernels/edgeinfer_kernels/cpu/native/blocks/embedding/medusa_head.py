"""A Medusa head: a residual layer and an output matrix, on the hidden states of the target."""

from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_bias,
    first_weights,
    normalize_and_quantize,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import add, load_floats, multiply, store_floats
from edgeinfer_kernels.cpu.native.simd.vector_math import sigmoid
from edgeinfer_kernels.cpu.runtime.embedding_args import MedusaHeadArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def add_activated(pool, counter, thread, block, step_args):
    """Phase: hidden = x + silu(hidden + b), in the input format of the output matrix."""
    tokens = step_args.tokens
    hidden = block.hidden
    columns = block.norm.padded
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        row = hidden.floats + token * hidden.float_stride
        add_bias(row, block.linear.bias, block.linear.rows)
        for i in range(0, columns, 16):
            value = load_floats(row + 4 * i)
            store_floats(row + 4 * i, add(load_floats(x + 4 * i), multiply(value, sigmoid(value))))
        write_activations(row, hidden, token, tokens, 0, hidden.columns)
        token = next_token(pool, counter, tokens, token)


@exports.add("medusa_head_block", MedusaHeadArgs, StepArgs, ThreadPoolArgs, int)
def medusa_head_block(block, step_args, pool, thread):
    """logits = W_out · (x + silu(W · x + b)) for the tokens of a step."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    linear, output, hidden = block.linear, block.output, block.hidden
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
    ahead, end = first_weights(pool, thread, tokens, linear)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, linear, block.normed, hidden.floats, hidden.float_stride, scratch)
    barrier_and_clear(pool, thread)
    add_activated(pool, 2, thread, block, step_args)
    ahead, end = first_weights(pool, thread, tokens, output)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 3, thread, tokens, output, hidden, block.logits, block.logits_stride, scratch)
