"""The attention block of an encoder: each token attends to its text, of which a step has several.

Keys and values of a step are in pages of sixteen tokens. A thread takes the sixteen queries of a page for one
head, four at a time with the same keys, and goes through the keys of their text in tiles with an online
softmax. Texts need no padding: pages are of the step's rows, and keys of other texts are masked.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.attention.attention_states import LANES, NEGATIVE
from edgeinfer_kernels.cpu.native.attention.encoder_tiles import add_values, score_keys, weigh_tile
from edgeinfer_kernels.cpu.native.attention.rope_heads import apply_rope, copy_padded
from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_bias,
    first_weights,
    normalize,
    normalize_and_quantize,
    project,
    project_residual,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_prefetching, next_item
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import load_floats, multiply, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, load_i64, store_f32
from edgeinfer_kernels.cpu.runtime.abi import ENCODER_KEYS, ENCODER_QUERIES, ROWS_SCRATCH
from edgeinfer_kernels.cpu.runtime.encoder_args import EncoderAttentionArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def finish_row(norm, matrix, row, qk_norm):
    """Add the bias to a projected row, and apply the norm of whole rows."""
    add_bias(row, matrix.bias, matrix.rows)
    if qk_norm == 2:
        normalize(norm, row, row)


@device_function
def finish_head(block, norm, source, table, target):
    """Copy a head with its norm and RoPE to `target`, zero-padded."""
    copy_padded(source, target, block.head_dim, block.padded_head)
    if block.qk_norm == 1:
        normalize(norm, target, target)
    apply_rope(target, table, block.rope_dim, block.rope_neox != 0)


@device_function
def store_queries(block, token, table):
    """Write a token's queries, times the scale of scores."""
    row = block.projected_q + token * block.q_stride
    padded = block.padded_head
    finish_row(block.q_norm, block.q_matrix, row, block.qk_norm)
    scale = splat_f32(np.float32(block.scale))
    for head in range(block.heads):
        target = block.queries + token * block.query_stride + 4 * padded * head
        finish_head(block, block.q_norm, row + 4 * block.head_dim * head, table, target)
        for i in range(0, padded, LANES):
            store_floats(target + 4 * i, multiply(load_floats(target + 4 * i), scale))


@device_function
def store_keys_and_values(block, token, table, spare):
    """Write a token's keys and values to its page. `spare`: scratch for a head."""
    padded, head_dim = block.padded_head, block.head_dim
    key_row = block.projected_k + token * block.kv_stride
    value_row = block.projected_v + token * block.kv_stride
    finish_row(block.k_norm, block.k_matrix, key_row, block.qk_norm)
    finish_row(block.k_norm, block.v_matrix, value_row, 0)
    page = token // LANES * block.page_bytes
    lane = token % LANES
    for head in range(block.kv_heads):
        at = page + 4 * LANES * padded * head
        finish_head(block, block.k_norm, key_row + 4 * head_dim * head, table, spare)
        for d in range(head_dim):
            store_f32(block.keys + at + 4 * (LANES * d + lane), load_f32(spare + 4 * d))
        values = block.values + at + 4 * padded * lane
        copy_padded(value_row + 4 * head_dim * head, values, head_dim, padded)


@device_function
def store_heads(pool, counter, block, step_args, spare):
    """Phase: queries, keys and values from projected rows, sixteen tokens at a time."""
    tokens = step_args.tokens
    while True:
        first = LANES * next_item(pool, counter)
        if first >= tokens:
            break
        for token in range(first, min(tokens, first + LANES)):
            position = token - load_i64(block.bounds + 16 * token)
            table = step_args.rope + 4 * block.rope_dim * position
            store_queries(block, token, table)
            store_keys_and_values(block, token, table, spare)


@device_function
def write_queries(block, head, row, count, sums):
    """Write the results of `count` queries of a head to `attn_out`."""
    head_dim, padded = block.head_dim, block.padded_head
    attn_out = block.attn_out
    for q in range(count):
        factor = np.float32(1) / load_f32(sums + 64 * q + 4)
        source = sums + 64 * ENCODER_QUERIES + 4 * padded * q
        target = attn_out.floats + (row + q) * attn_out.float_stride + 4 * head_dim * head
        whole = head_dim // LANES * LANES
        for d in range(0, whole, LANES):
            store_floats(target + 4 * d, multiply(load_floats(source + 4 * d), splat_f32(factor)))
        for d in range(whole, head_dim):
            store_f32(target + 4 * d, load_f32(source + 4 * d) * factor)


@device_function
def attend_queries(block, head, row, count, scores):
    """Softmax attention of `count` queries of a head, of tokens of one text from `row` on.

    `scores`: scratch; after it 64 bytes for each query, the largest score and the sum of exponentials, and
    then the weighted values.
    """
    padded = block.padded_head
    half = block.window // 2
    begin = load_i64(block.bounds + 16 * row)
    end = load_i64(block.bounds + 16 * row + 8)
    if half > 0:
        begin = max(begin, row - half)
        end = min(end, row + count + half)
    sums = scores + 4 * ENCODER_QUERIES * ENCODER_KEYS
    values = sums + 64 * ENCODER_QUERIES
    for q in range(ENCODER_QUERIES):
        store_f32(sums + 64 * q, NEGATIVE)
        store_f32(sums + 64 * q + 4, np.float32(0))
        for d in range(0, padded, LANES):
            store_floats(values + 4 * (padded * q + d), splat_f32(np.float32(0)))
    kv_offset = 4 * LANES * padded * (head // (block.heads // block.kv_heads))
    for tile in range(begin // LANES * LANES, end, ENCODER_KEYS):
        last = min(end, tile + ENCODER_KEYS)
        pages = tile // LANES * block.page_bytes + kv_offset
        score_keys(block, head, row, count, tile, last, block.keys + pages, scores)
        for q in range(ENCODER_QUERIES):
            own = row + min(q, count - 1)
            low = max(begin, own - half) if half > 0 else begin
            high = min(end, own + half + 1) if half > 0 else end
            weigh_tile(scores + 4 * ENCODER_KEYS * q, low - tile, high - tile, last - tile, sums + 64 * q)
        first = max(begin, tile) - tile
        add_values(scores, block.values + pages, block.page_bytes, first, last - tile, padded, sums)
    write_queries(block, head, row, count, sums)


@device_function
def attend(pool, counter, block, step_args, scores):
    """Phase: softmax attention of every page of tokens and head."""
    tokens = step_args.tokens
    pages = (tokens + LANES - 1) // LANES
    while True:
        item = next_item(pool, counter)
        if item >= pages * block.heads:
            break
        head = item // pages
        row = LANES * (item % pages)
        last = min(tokens, row + LANES)
        while row < last:
            count = min(min(ENCODER_QUERIES, last - row), load_i64(block.bounds + 16 * row + 8) - row)
            attend_queries(block, head, row, count, scores)
            row += count


@exports.add("encoder_attention_block", EncoderAttentionArgs, StepArgs, ThreadPoolArgs, int)
def encoder_attention_block(block, step_args, pool, thread):
    """x += scale · norm(W_o · attention(norm(x))) for the texts of a step."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    normed, attn_out = block.normed, block.attn_out
    q_matrix, output = block.q_matrix, block.output_matrix
    kv_stride = block.kv_stride
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, q_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, q_matrix, normed, block.projected_q, block.q_stride, scratch)
    project(pool, 2, thread, tokens, block.k_matrix, normed, block.projected_k, kv_stride, scratch)
    project(pool, 3, thread, tokens, block.v_matrix, normed, block.projected_v, kv_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    store_heads(pool, 4, block, step_args, scratch + ROWS_SCRATCH)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    attend(pool, 5, block, step_args, scratch + ROWS_SCRATCH)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    quantize_input(pool, 6, step_args, attn_out)
    barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 7, thread, step_args, block, output, attn_out, scratch)
