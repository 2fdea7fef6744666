"""The attention block: norm, projections, RoPE, KV cache, softmax attention, output projection, residual.

`attention_block` computes a whole block for some tokens on all threads of a pool. `AttentionArgs` holds what
is fixed at load time: the specification, and addresses of matrices, cache and workspace.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.attention.attention_states import (
    STATE_BYTES,
    add_sink,
    clear_states,
    merge_state,
    write_states,
)
from edgeinfer_kernels.cpu.native.attention.cache_writing import (
    first_recent,
    last_position,
    position_of,
    recent_pages_of,
    token_args_of,
)
from edgeinfer_kernels.cpu.native.attention.hadamard_heads import hadamard_head
from edgeinfer_kernels.cpu.native.attention.rope_heads import (
    has_hadamard_values,
    share_of_heads,
    store_heads,
)
from edgeinfer_kernels.cpu.native.attention.softmax import gather
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    normalize_rows,
    project,
    project_from,
    project_residual,
    quantize_input,
    read_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_prefetching, next_item, next_token
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    first_lane,
    load_floats,
    multiply,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import sigmoid, softplus
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATIONS_PER_BLOCK,
    ROWS_SCRATCH,
    SCORES_PER_THREAD,
    STEP_TOKENS,
)
from edgeinfer_kernels.cpu.runtime.block_args import AttentionArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs


@device_function
def pieces_of(block, pool, tokens, positions):
    """The number of KV splits of a token's `positions`: several if there are fewer heads than threads.

    In a short step the splits of a token are the same as if it were alone, so evaluating several tokens at
    once is bit-identical to one by one.
    """
    alone = 1 if tokens <= STEP_TOKENS else tokens
    items = alone * block.kv_heads
    wanted = block.pieces_per_thread * pool.threads
    if items >= wanted:
        return 1
    length = block.positions_per_piece
    return min((wanted + items - 1) // items, (positions + length - 1) // length)


@device_function
def state_bytes(block):
    """Bytes of the states of all query heads of one KV head."""
    group = block.heads // block.kv_heads
    return group * (STATE_BYTES + 4 * block.padded_value)


@device_function
def end_of(block, step_args, token):
    """The end of the positions that a token attends to."""
    return (last_position(step_args) if block.whole_step != 0 else position_of(step_args, token)) + 1


def make_gather_item(gather):
    """`gather_item` for caches that a result of `make_gather` reads."""

    @device_function
    def gather_item(block, step_args, item, pieces, own_pieces, states, scores, copied):
        """Compute the states of one token's KV head over one of its `own_pieces` KV splits; a token has
        `pieces` items.
        """
        kv_heads = block.kv_heads
        group = block.heads // kv_heads
        token = item // (kv_heads * pieces)
        kv_head = item // pieces % kv_heads
        own = position_of(step_args, token)
        end = end_of(block, step_args, token)
        token_args = token_args_of(step_args, token)
        pages = token_args.pages if token_args.address != 0 else 0
        window = block.window
        begin = max(0, own + 1 - window) if window > 0 else 0
        if block.chunked != 0:
            begin = own // window * window
        share = (end - begin + own_pieces - 1) // own_pieces
        first = min(end, begin + item % pieces * share)
        last = min(end, first + share)
        query = block.queries + token * block.query_stride
        query += 4 * block.padded_head * group * kv_head
        clear_states(states, group, block.padded_value)
        recent = recent_pages_of(block, step_args, token_args)
        middle = min(last, max(first, first_recent(own))) if recent != 0 else last
        if first < middle:
            gather(block, block.cache, query, kv_head, first, middle, own, pages, states, scores, copied)
        if middle < last:
            gather(block, block.recent, query, kv_head, middle, last, own, recent, states, scores, copied)

    return gather_item


@device_function
def heads_fill_blocks(block):
    """Whether the query heads of a KV head fill whole blocks of activations."""
    group = block.heads // block.kv_heads
    return group * block.value_dim % ACTIVATIONS_PER_BLOCK == 0


@device_function
def gate_of(x, is_softplus):
    """The function of sixteen gates."""
    if is_softplus:
        return softplus(x, splat_f32(np.float32(0)))
    return sigmoid(x)


@device_function
def apply_gate(values, gates, count, is_softplus):
    """values *= sigmoid(gates) or softplus(gates)."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        gate = gate_of(load_floats(gates + 4 * i), is_softplus)
        store_floats(values + 4 * i, multiply(load_floats(values + 4 * i), gate))
    for i in range(whole, count):
        gate = first_lane(gate_of(splat_f32(load_f32(gates + 4 * i)), is_softplus))
        store_f32(values + 4 * i, load_f32(values + 4 * i) * gate)


@device_function
def gate_head(values, gate, count, is_softplus):
    """values *= the function of one gate."""
    factor = gate_of(splat_f32(load_f32(gate)), is_softplus)
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store_floats(values + 4 * i, multiply(load_floats(values + 4 * i), factor))
    for i in range(whole, count):
        store_f32(values + 4 * i, load_f32(values + 4 * i) * first_lane(factor))


@device_function
def write_heads(block, token, tokens, first_head, heads, states):
    """Write the merged states of some of a token's heads to its row of `attn_out`."""
    value_dim = block.value_dim
    attn_out = block.attn_out
    row = attn_out.floats + token * attn_out.float_stride
    padded = block.padded_value
    sinks = block.sinks
    if sinks != 0:
        for g in range(heads):
            state = states + g * (STATE_BYTES + 4 * padded)
            add_sink(state, load_f32(sinks + 4 * (first_head + g)), padded)
    if has_hadamard_values(block):
        for g in range(heads):
            hadamard_head(states + g * (STATE_BYTES + 4 * padded) + STATE_BYTES, value_dim, padded)
    write_states(states, heads, value_dim, padded, row + 4 * value_dim * first_head)
    is_softplus = block.has_softplus_gates != 0
    if block.gate_matrix.address != 0:
        gates = block.head_gates + token * block.head_gates_stride
        for head in range(first_head, first_head + heads):
            gate_head(row + 4 * value_dim * head, gates + 4 * head, value_dim, is_softplus)
    if block.gated != 0:
        gates = block.projected_q + token * block.q_stride
        for head in range(first_head, first_head + heads):
            apply_gate(
                row + 4 * value_dim * head, gates + 4 * value_dim * (2 * head + 1), value_dim, is_softplus
            )


@device_function
def write_item(block, tokens, item, states):
    """Write the merged states of one token's KV head to its row of `attn_out`; quantized if they fill whole
    blocks.
    """
    group = block.heads // block.kv_heads
    attn_out = block.attn_out
    token = item // block.kv_heads
    first_head = group * (item % block.kv_heads)
    write_heads(block, token, tokens, first_head, group, states)
    if heads_fill_blocks(block):
        row = attn_out.floats + token * attn_out.float_stride
        first = block.value_dim * first_head
        write_activations(row, attn_out, token, tokens, first, first + group * block.value_dim)


def make_attend(gather_item):
    """`attend` with a result of `make_gather_item`."""

    @device_function
    def attend(pool, counter, thread, block, step_args, pieces, share, scratch):
        """Phase: softmax attention of every token and KV head; with several KV splits, `merge_pieces`
        completes it. `share`: as for `store_heads`. Over many positions a thread that is slower than others
        takes fewer items.
        """
        tokens = step_args.tokens
        kv_heads = block.kv_heads
        scores = scratch + ROWS_SCRATCH
        copied = scores + SCORES_PER_THREAD + state_bytes(block)
        is_long = last_position(step_args) >= block.positions_per_piece
        own_items = 0
        item = thread * share if share > 0 else thread
        while thread * share < kv_heads:
            token = item // (kv_heads * pieces)
            if token >= tokens:
                break
            if pieces == 1:
                gather_item(block, step_args, item, pieces, 1, scores + SCORES_PER_THREAD, scores, copied)
                write_item(block, tokens, item, scores + SCORES_PER_THREAD)
            else:
                own = pieces_of(block, pool, tokens, end_of(block, step_args, token))
                states = block.states + item * state_bytes(block)
                if item % pieces < own:
                    gather_item(block, step_args, item, pieces, own, states, scores, copied)
            own_items += 1
            if share > 0:
                item = own_items // share * kv_heads + thread * share + own_items % share
            elif is_long:
                item = pool.threads + next_item(pool, counter)
            else:
                item = next_token(pool, counter, tokens, item)

    return attend


attend = make_attend(make_gather_item(gather))


@device_function
def merge_pieces(pool, counter, thread, block, step_args, pieces):
    """Phase: merge the states of all KV splits of a token's KV head, and write its row of `attn_out`."""
    tokens = step_args.tokens
    padded = block.padded_value
    nbytes = state_bytes(block)
    item = thread
    while item < tokens * block.kv_heads:
        token = item // block.kv_heads
        own = pieces_of(block, pool, tokens, end_of(block, step_args, token))
        states = block.states + item * pieces * nbytes
        for piece in range(1, own):
            for offset in range(0, nbytes, STATE_BYTES + 4 * padded):
                merge_state(states + offset, states + piece * nbytes + offset, padded)
        write_item(block, tokens, item, states)
        item = next_token(pool, counter, tokens, item)


exports = Exports()


@exports.add("attention_block", AttentionArgs, StepArgs, ThreadPoolArgs, int)
def attention_block(block, step_args, pool, thread):
    """x += scale · norm(W_o · attention(norm(x))) for the tokens of `step_args`; keys and values are written
    to the cache.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    attn_out = block.attn_out
    q_stride = block.q_stride
    kv_stride = block.kv_stride
    output = block.output_matrix
    q_matrix = block.q_matrix
    pieces = pieces_of(block, pool, tokens, last_position(step_args) + 1)
    share = share_of_heads(block, pool, tokens, pieces)
    normed = read_input(pool, thread, step_args, block.norm, block.normed, q_matrix)
    q = block.projected_q
    k = block.projected_k
    v = block.projected_v
    first = project_from(pool, 1, thread, 0, tokens, q_matrix, normed, q, q_stride, scratch)
    if block.queries_only == 0:
        first = project_from(pool, 2, thread, first, tokens, block.k_matrix, normed, k, kv_stride, scratch)
        project_from(pool, 3, thread, first, tokens, block.v_matrix, normed, v, kv_stride, scratch)
    if block.gate_matrix.address != 0:
        gates, gate_stride = block.head_gates, block.head_gates_stride
        project(pool, 10, thread, tokens, block.gate_matrix, normed, gates, gate_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    store_heads(pool, 4, thread, block, step_args, share, scratch)
    if share == 0:
        ahead = barrier_prefetching(pool, thread, ahead, end)
    attend(pool, 5, thread, block, step_args, pieces, share, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    if pieces > 1:
        merge_pieces(pool, 6, thread, block, step_args, pieces)
        ahead = barrier_prefetching(pool, thread, ahead, end)
    if block.sub_norm.address != 0:
        normalize_rows(pool, 7, thread, step_args, block.sub_norm, attn_out)
        barrier_prefetching(pool, thread, ahead, end)
    elif not heads_fill_blocks(block):
        quantize_input(pool, 7, step_args, attn_out)
        barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 8, thread, step_args, block, output, attn_out, scratch)
