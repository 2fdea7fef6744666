"""The embeddings of a step's tokens as a block of a schedule: no Python, on all threads."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.thread_pool import next_token
from edgeinfer_kernels.cpu.native.gemv.lora import add_lora_embedding
from edgeinfer_kernels.cpu.native.simd.exports import Exports
from edgeinfer_kernels.cpu.native.simd.float_lanes import load_floats, multiply, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.simd.scalars import call_pointer_6, load_i64
from edgeinfer_kernels.cpu.runtime.block_args import EmbedArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@exports.add("embed_block", EmbedArgs, StepArgs, ThreadPoolArgs, int)
def embed_block(block, step_args, pool, thread):
    """x = scale · rows `ids` of the embeddings, for the tokens of a step. Reads a row's bytes per token."""
    columns = block.columns
    scale = block.scale
    scratch = block.scratch + thread * block.scratch_stride
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        row = load_i64(block.ids + 8 * token)
        target = step_args.x + token * step_args.x_stride
        call_pointer_6(
            block.decode,
            block.source + row * block.row_bytes,
            columns,
            block.fields.address,
            block.field_count,
            scratch,
            target,
        )
        add_lora_embedding(block.lora, row, target)
        if scale != np.float32(1):
            for column in range(0, columns, 16):
                at = target + 4 * column
                store_floats(at, multiply(load_floats(at), splat_f32(scale)))
        token = next_token(pool, 0, tokens, token)
