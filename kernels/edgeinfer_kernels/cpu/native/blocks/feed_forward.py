"""The feed-forward block, the output head, the norm and the positions of the embedding."""

import numpy as np

from edgeinfer_kernels.cpu.native.attention.cache_writing import position_of
from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_bias,
    chunks_by,
    first_row,
    first_weights,
    multiply_input,
    next_chunk,
    next_piece,
    normalize,
    normalize_and_quantize,
    normalize_rows,
    project,
    project_residual,
    read_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_prefetching, next_token
from edgeinfer_kernels.cpu.native.gemv.lora import add_lora, lora_products
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import add, load_floats, multiply, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.simd.vector_math import activate, activate_gated
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS_PER_BLOCK, STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import FeedForwardArgs, HeadArgs
from edgeinfer_kernels.cpu.runtime.embedding_args import EmbeddingNormArgs, PositionEmbeddingArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import NormArgs, StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import NormRowsArgs

exports = Exports()


@device_function
def biased(row, matrix, i):
    """Sixteen values of a projected row times the matrix's scale plus its bias."""
    value = multiply(load_floats(row + 4 * i), splat_f32(np.float32(matrix.scale)))
    bias = matrix.bias
    if bias != 0:
        value = add(value, load_floats(bias + 4 * i))
    return value


@device_function
def activate_piece(code, gate_matrix, up_matrix, gate, up, hidden, token, tokens, first, last):
    """Columns first..last of a token's up row in place: activation(gate)·up, or activation(up) without a
    gate; in the input format of W_down.
    """
    for i in range(first, last, 16):
        value = biased(up, up_matrix, i)
        if gate_matrix.address != 0:
            value = activate_gated(code, biased(gate, gate_matrix, i), value)
        else:
            value = activate(code, value)
        store_floats(up + 4 * i, value)
    write_activations(up, hidden, token, tokens, first, last)


@device_function
def activate_and_quantize(pool, counter, tokens, code, gate_matrix, up_matrix, gate_rows, hidden):
    """Phase: hidden = activation(gate)·up, or activation(up) without a gate, in the input format of W_down;
    in pieces.
    """
    columns = hidden.columns
    stride = hidden.float_stride
    while True:
        token, first, last = next_piece(pool, counter, columns)
        if token >= tokens:
            break
        up = hidden.floats + token * stride
        gate = gate_rows + token * stride
        activate_piece(code, gate_matrix, up_matrix, gate, up, hidden, token, tokens, first, last)


@device_function
def project_activated(pool, counter, thread, block, normed, tokens, scratch):
    """Phase: from the normed x to the hidden rows in the input format of W_down. The thread that computed a
    chunk of gate and up continues with it immediately: no barrier is needed, and the data is still in its L1
    cache.
    """
    hidden = block.hidden
    gate_matrix = block.gate_matrix
    up_matrix = block.up_matrix
    gate = block.gate
    up = hidden.floats
    stride = hidden.float_stride
    code = block.activation
    rows = up_matrix.rows
    threads = pool.threads
    chunk, chunks = chunks_by(pool, up_matrix, ACTIVATIONS_PER_BLOCK)
    floats = normed.floats
    float_stride = normed.float_stride
    up_products = lora_products(up_matrix.lora, 0, thread, 0, floats, float_stride, tokens)
    gate_products = 0
    if gate_matrix.address != 0:
        gate_products = lora_products(gate_matrix.lora, 0, thread, 1, floats, float_stride, tokens)
    item = thread
    while item < threads * chunks:
        first = first_row(item, threads, chunk, chunks)
        if first < rows:
            last = min(rows, first + chunk)
            if gate_matrix.address != 0:
                multiply_input(gate_matrix, normed, first, last, tokens, gate, stride, scratch)
                add_lora(gate_matrix.lora, 0, gate_products, first, last, tokens, gate, stride)
            multiply_input(up_matrix, normed, first, last, tokens, up, stride, scratch)
            add_lora(up_matrix.lora, 0, up_products, first, last, tokens, up, stride)
            for token in range(tokens):
                at = token * stride
                activate_piece(
                    code, gate_matrix, up_matrix, gate + at, up + at, hidden, token, tokens, first, last
                )
        item = next_chunk(pool, counter, item, chunks, up_matrix)


@exports.add("feed_forward_block", FeedForwardArgs, StepArgs, ThreadPoolArgs, int)
def feed_forward_block(block, step_args, pool, thread):
    """x += scale · norm(W_down · (activation(W_gate·norm(x)) · W_up·norm(x))) for the tokens of a step."""
    tokens = step_args.tokens
    scratch = block.scratch
    scratch += thread * block.scratch_stride
    hidden = block.hidden
    gate_matrix = block.gate_matrix
    hidden_stride = hidden.float_stride
    down = block.down_matrix
    up_matrix = block.up_matrix
    first_matrix = gate_matrix if gate_matrix.address != 0 else up_matrix
    normed = read_input(pool, thread, step_args, block.norm, block.normed, first_matrix)
    gate = block.gate
    code = block.activation
    ahead, end = first_weights(pool, thread, tokens, down)
    if tokens <= STEP_TOKENS:
        project_activated(pool, 1, thread, block, normed, tokens, scratch)
    else:
        if gate_matrix.address != 0:
            project(pool, 1, thread, tokens, gate_matrix, normed, gate, hidden_stride, scratch)
        up = hidden.floats
        project(pool, 2, thread, tokens, up_matrix, normed, up, hidden_stride, scratch)
        ahead = barrier_prefetching(pool, thread, ahead, end)
        activate_and_quantize(pool, 3, tokens, code, gate_matrix, up_matrix, gate, hidden)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    if block.sub_norm.address != 0:
        normalize_rows(pool, 6, thread, step_args, block.sub_norm, hidden)
        barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 4, thread, step_args, block, down, hidden, scratch)


@exports.add("head_block", HeadArgs, StepArgs, ThreadPoolArgs, int)
def head_block(block, step_args, pool, thread):
    """logits = W_output · norm(x) for the tokens of a step."""
    scratch = block.scratch + thread * block.scratch_stride
    tokens = step_args.tokens
    matrix = block.matrix
    normed = read_input(pool, thread, step_args, block.norm, block.normed, matrix)
    project(
        pool,
        1,
        thread,
        tokens,
        matrix,
        normed,
        block.logits,
        block.logits_stride,
        scratch,
    )


@exports.add("norm_rows", NormArgs, int, int, int, int)
def norm_rows(norm, x, out, stride, tokens):
    """out = norm(x) for rows of both that are `stride` bytes apart, on one thread."""
    for token in range(tokens):
        normalize(norm, x + token * stride, out + token * stride)


@exports.add("norm_rows_block", NormRowsArgs, StepArgs, ThreadPoolArgs, int)
def norm_rows_block(block, step_args, pool, thread):
    """Write norm(x) to the input of a later block."""
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)


@exports.add("position_embedding_block", PositionEmbeddingArgs, StepArgs, ThreadPoolArgs, int)
def position_embedding_block(block, step_args, pool, thread):
    """x += the row of each token's position."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        position = min(position_of(step_args, token), block.positions - 1)
        add_bias(x, block.rows + block.row_bytes * position, block.padded)
        token = next_token(pool, 0, tokens, token)


@exports.add("embedding_norm_block", EmbeddingNormArgs, StepArgs, ThreadPoolArgs, int)
def embedding_norm_block(block, step_args, pool, thread):
    """x ← norm(x)."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        normalize(block.norm, x, x)
        token = next_token(pool, 0, tokens, token)
