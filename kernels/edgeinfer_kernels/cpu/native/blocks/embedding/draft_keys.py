"""Keys and values of a target's states for the cache of a block drafter's layer."""

from edgeinfer_kernels.cpu.native.attention.rope_heads import rope_and_store
from edgeinfer_kernels.cpu.native.blocks.phases import first_weights, normalize_and_quantize, project
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_item,
)
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.runtime.abi import ROWS_SCRATCH
from edgeinfer_kernels.cpu.runtime.block_args import AttentionArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def store_keys_and_values(pool, counter, block, step_args, scratch):
    """Phase: store the keys and values of all tokens in the cache, head by head."""
    every = 2 * block.kv_heads
    while True:
        item = next_item(pool, counter)
        token = item // every
        if token >= step_args.tokens:
            break
        rope_and_store(block, step_args, token, block.heads + item - token * every, scratch + ROWS_SCRATCH)


@exports.add("draft_keys_block", AttentionArgs, StepArgs, ThreadPoolArgs, int)
def draft_keys_block(block, step_args, pool, thread):
    """The keys and values of x are written to the cache; x remains as it is."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    stride = block.kv_stride
    normed = block.normed
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, block.k_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, block.k_matrix, normed, block.projected_k, stride, scratch)
    project(pool, 2, thread, tokens, block.v_matrix, normed, block.projected_v, stride, scratch)
    barrier_and_clear(pool, thread)
    store_keys_and_values(pool, 3, block, step_args, scratch)
