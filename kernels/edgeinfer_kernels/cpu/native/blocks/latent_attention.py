"""The latent attention block: queries and latent vectors, softmax attention over the latent cache, values."""

from edgeinfer_kernels.cpu.native.attention.attention import (
    make_attend,
    make_gather_item,
    pieces_of,
    state_bytes,
    write_heads,
)
from edgeinfer_kernels.cpu.native.attention.attention_states import STATE_BYTES, merge_state
from edgeinfer_kernels.cpu.native.attention.cache_writing import (
    last_position,
    position_of,
    store_all_values,
    token_args_of,
)
from edgeinfer_kernels.cpu.native.attention.hadamard_heads import hadamard_head
from edgeinfer_kernels.cpu.native.attention.latent_softmax import gather_latents
from edgeinfer_kernels.cpu.native.attention.rope_heads import (
    apply_rope,
    copy_padded,
    has_hadamard_keys,
    scale_by_position,
)
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    multiply_rows,
    normalize,
    normalize_and_quantize,
    operands,
    project,
    project_residual,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_prefetching,
    next_item,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_BYTES, ROWS_SCRATCH
from edgeinfer_kernels.cpu.runtime.block_args import LatentAttentionArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

ROWS_PER_ITEM = 128
"""Rows of a head's matrix that a thread multiplies at a time."""
exports = Exports()
attend_latents = make_attend(make_gather_item(gather_latents))


@device_function
def normalize_query_latents(pool, counter, block, step_args):
    """Phase: the norm of each token's low-rank query, in place and in the input format of the next matrix."""
    tokens = step_args.tokens
    latents = block.query_latents
    while True:
        token = next_item(pool, counter)
        if token >= tokens:
            break
        row = latents.floats + token * latents.float_stride
        normalize(block.query_norm, row, row)
        write_activations(row, latents, token, tokens, 0, latents.columns)


@device_function
def rope_tail(block, step_args, token, source, target):
    """Copy the elements with RoPE to the end of a row of the cache's width, zero-padded, and apply RoPE."""
    attention = block.attention
    padded = attention.padded_head
    latent_dim = block.latent_dim
    tail = target + 4 * latent_dim
    copy_padded(source, tail, block.rope_dim, padded - latent_dim)
    if block.has_rope != 0:
        rope_dim = attention.rope_dim
        distance = position_of(step_args, token) - step_args.start
        apply_rope(tail, step_args.rope + 4 * rope_dim * distance, rope_dim, attention.rope_neox != 0)
    if has_hadamard_keys(attention):
        hadamard_head(tail, block.rope_dim, padded - latent_dim)


@device_function
def store_row(block, step_args, token, row):
    """Store a token's latent vector and its elements with RoPE in the cache; `row` is scratch."""
    attention = block.attention
    latent_dim = block.latent_dim
    projected = attention.projected_k + token * attention.kv_stride
    normalize(block.latent_norm, projected, row)
    if has_hadamard_keys(attention):
        hadamard_head(row, latent_dim, latent_dim)
    rope_tail(block, step_args, token, projected + 4 * latent_dim, row)
    spare = row + 4 * attention.padded_head
    token_args, position = token_args_of(step_args, token), position_of(step_args, token)
    store_all_values(attention, 0, step_args, token_args, position, row, spare)


@device_function
def split_queries(pool, counter, block, step_args, scratch):
    """Phase: each query's elements without RoPE in the input format of the next matrix, and those with RoPE
    in its row for attention; the step's rows of the cache.
    """
    tokens = step_args.tokens
    attention = block.attention
    nope_queries = block.nope_queries
    nope_dim = block.nope_dim
    heads = attention.heads
    query_bytes = 4 * (nope_dim + block.rope_dim)
    while True:
        item = next_item(pool, counter)
        token = item // (heads + 1)
        if token >= tokens:
            break
        head = item % (heads + 1)
        if head == heads:
            store_row(block, step_args, token, scratch + ROWS_SCRATCH)
        else:
            query = attention.projected_q + token * attention.q_stride + query_bytes * head
            target = attention.queries + token * attention.query_stride + 4 * attention.padded_head * head
            scale_by_position(attention, position_of(step_args, token), query, query_bytes // 4)
            rope_tail(block, step_args, token, query + 4 * nope_dim, target)
            row = nope_queries.floats + token * nope_queries.float_stride
            first = nope_dim * head
            copy_padded(query, row + 4 * first, nope_dim, nope_dim)
            write_activations(row, nope_queries, token, tokens, first, first + nope_dim)


@device_function
def project_heads(pool, counter, tokens, heads, matrix, source, out, out_stride, head_bytes, scratch):
    """Phase: each head's rows of a matrix times the head's columns of `source`; the results of a head begin
    `head_bytes` after those of the one before.
    """
    rows = matrix.rows // heads
    columns = matrix.columns
    activations, stride = operands(matrix, source)
    column_bytes = columns // 32 * ACTIVATION_BYTES if matrix.quantized != 0 else 4 * columns
    pieces = (rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
    while True:
        item = next_item(pool, counter)
        head = item // pieces
        if head >= heads:
            break
        first = head * rows + item % pieces * ROWS_PER_ITEM
        last = min((head + 1) * rows, first + ROWS_PER_ITEM)
        own = activations + head * column_bytes
        target = out + head * (head_bytes - 4 * rows)
        kernel = matrix.kernel
        multiply_rows(kernel, matrix, first, last, own, stride, tokens, target, out_stride, scratch)


@device_function
def hadamard_queries(pool, counter, block, step_args):
    """Phase: the latent part of each query in the basis of the cache."""
    attention = block.attention
    heads = attention.heads
    while True:
        item = next_item(pool, counter)
        token = item // heads
        if token >= step_args.tokens:
            break
        query = attention.queries + token * attention.query_stride
        hadamard_head(query + 4 * attention.padded_head * (item % heads), block.latent_dim, block.latent_dim)


@device_function
def merge_heads(pool, counter, attention, step_args, pieces):
    """Phase: merge the states of all KV splits of each head, and write its part of `attn_out`."""
    tokens = step_args.tokens
    heads = attention.heads
    value_dim, padded = attention.value_dim, attention.padded_value
    attn_out = attention.attn_out
    nbytes = state_bytes(attention)
    while True:
        item = next_item(pool, counter)
        token, head = item // heads, item % heads
        if token >= tokens:
            break
        own = pieces_of(attention, pool, tokens, position_of(step_args, token) + 1)
        state = attention.states + token * pieces * nbytes + head * (STATE_BYTES + 4 * padded)
        for piece in range(1, own):
            merge_state(state, state + piece * nbytes, padded)
        write_heads(attention, token, tokens, head, 1, state)
        row = attn_out.floats + token * attn_out.float_stride
        write_activations(row, attn_out, token, tokens, value_dim * head, value_dim * (head + 1))


@exports.add("latent_attention_block", LatentAttentionArgs, StepArgs, ThreadPoolArgs, int)
def latent_attention_block(block, step_args, pool, thread):
    """x += scale · norm(W_o · W_v · attention(W_kᵀ q)), with q = W_q · norm(x), for the tokens of
    `step_args`; their latent vectors are written to the cache.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    attention = block.attention
    normed, latents, attn_out = block.normed, block.query_latents, block.attn_out
    heads = attention.heads
    query_a, query, kv_matrix = block.query_a_matrix, block.query_matrix, block.kv_matrix
    key_matrix, value_matrix, output = block.key_matrix, block.value_matrix, block.output_matrix
    q, q_stride = attention.projected_q, attention.q_stride
    k, k_stride = attention.projected_k, attention.kv_stride
    pieces = pieces_of(attention, pool, tokens, last_position(step_args) + 1)
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, kv_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, kv_matrix, normed, k, k_stride, scratch)
    if query_a.address != 0:
        project(pool, 2, thread, tokens, query_a, normed, latents.floats, latents.float_stride, scratch)
        ahead, end = first_weights(pool, thread, tokens, query)
        ahead = barrier_prefetching(pool, thread, ahead, end)
        normalize_query_latents(pool, 3, block, step_args)
        barrier_prefetching(pool, thread, ahead, end)
        project(pool, 4, thread, tokens, query, latents, q, q_stride, scratch)
    else:
        project(pool, 4, thread, tokens, query, normed, q, q_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    split_queries(pool, 5, block, step_args, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    nope, head_bytes = block.nope_queries, 4 * attention.padded_head
    queries, query_stride = attention.queries, attention.query_stride
    project_heads(pool, 6, tokens, heads, key_matrix, nope, queries, query_stride, head_bytes, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    if has_hadamard_keys(attention):
        hadamard_queries(pool, 7, block, step_args)
        ahead = barrier_prefetching(pool, thread, ahead, end)
    attend_latents(pool, 8, thread, attention, step_args, pieces, 0, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    if pieces > 1:
        merge_heads(pool, 9, attention, step_args, pieces)
        ahead = barrier_prefetching(pool, thread, ahead, end)
    values, value_stride, value_bytes = attn_out.floats, attn_out.float_stride, 4 * block.value_dim
    sums = attention.attn_out
    project_heads(pool, 10, tokens, heads, value_matrix, sums, values, value_stride, value_bytes, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    quantize_input(pool, 11, step_args, attn_out)
    barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 12, thread, step_args, block, output, attn_out, scratch)
