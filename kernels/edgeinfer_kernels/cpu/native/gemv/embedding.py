"""The embeddings of a step's tokens as a block of a schedule: no Python, on all threads."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.thread_pool import next_token
from edgeinfer_kernels.cpu.native.simd.exports import Exports
from edgeinfer_kernels.cpu.native.simd.float_lanes import load_floats, multiply, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.simd.scalars import call_pointer_6, load_f32, load_i64
from edgeinfer_kernels.cpu.runtime.abi import CALL, EMBED

exports = Exports()


@exports.add("embed_block", 4)
def embed_block(block, call, team, thread):
    """x = scale · rows `ids` of the embeddings, for the tokens of `call`. Reads a row's bytes per token."""
    columns = load_i64(block + EMBED.columns)
    scale = load_f32(block + EMBED.scale)
    scratch = load_i64(block + EMBED.scratch) + thread * load_i64(block + EMBED.scratch_stride)
    tokens = load_i64(call + CALL.tokens)
    token = thread
    while token < tokens:
        row = load_i64(load_i64(block + EMBED.ids) + 8 * token)
        target = load_i64(call + CALL.x) + token * load_i64(call + CALL.x_stride)
        call_pointer_6(
            load_i64(block + EMBED.decode),
            load_i64(block + EMBED.source) + row * load_i64(block + EMBED.row_bytes),
            columns,
            load_i64(block + EMBED.fields),
            load_i64(block + EMBED.field_count),
            scratch,
            target,
        )
        if scale != np.float32(1):
            for column in range(0, columns, 16):
                at = target + 4 * column
                store_floats(at, multiply(load_floats(at), splat_f32(scale)))
        token = next_token(team, 0, tokens, token)
