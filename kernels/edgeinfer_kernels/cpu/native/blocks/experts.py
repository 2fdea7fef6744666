"""The MoE block: router, experts of each token, their feed-forwards, weighted sum.

A pair is a token-expert assignment. Pairs are sorted by expert, so that the rows of an expert are read once
for all its tokens. Work is distributed as (expert in use, chunk of rows), in chunks small enough to keep all
threads busy even with few experts. With one token, its quantized row is read in place.
"""

import numpy as np

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.native.blocks.feed_forward import activate_and_quantize
from edgeinfer_kernels.cpu.native.blocks.phases import (
    ROW_CHUNKS_A_THREAD,
    ROWS_PER_PAIR,
    kernel_for,
    next_piece,
    normalize_and_quantize,
    operands,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.routing import active_count, choose, entry_at, sort_by_expert
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier, next_item
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations_from
from edgeinfer_kernels.cpu.native.simd.exports import Exports, inner
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    lanes_max,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import call_pointer_10, load_f32, load_i64
from edgeinfer_kernels.cpu.native.simd.vector_math import activate_gated, sigmoid, sum_of_products
from edgeinfer_kernels.cpu.runtime.abi import CALL, EXPERTS, INPUT, MATRIX, NORM, TEAM

CHUNKS_OF_MANY = 4
"""Factor of the chunk count if experts have different numbers of tokens."""

exports = Exports()


@inner
def gather(team, counter, block, tokens):
    """Phase: copy each pair's normed row to its index, in the format for its expert's number of pairs."""
    used = load_i64(block + EXPERTS.used)
    normed = load_i64(block + EXPERTS.normed)
    gathered = load_i64(block + EXPERTS.gathered)
    columns = load_i64(normed + INPUT.columns)
    copies = load_i64(gathered + INPUT.floats)
    while True:
        pair = next_item(team, counter)
        if pair >= tokens * used:
            break
        row = load_i64(normed + INPUT.floats) + pair // used * load_i64(normed + INPUT.float_stride)
        place = load_i64(load_i64(block + EXPERTS.places) + 8 * pair)
        if place < 0:
            continue
        entry = entry_at(block, load_i64(load_i64(block + EXPERTS.entries) + 8 * pair))
        start = load_i64(entry + 8)
        pairs = load_i64(entry + 16)
        write_activations_from(row, gathered, start, place - start, pairs, 0, columns)
        if copies != 0:
            target = copies + place * load_i64(gathered + INPUT.float_stride)
            for i in range(0, columns, 16):
                store_floats(target + 4 * i, load_floats(row + 4 * i))


@inner
def chunk_of(team, rows, tokens):
    """Rows per chunk, out of `rows` in all experts in use."""
    step = ROWS_PER_PAIR if tokens > 1 else ROWS_PER_GROUP
    shares = load_i64(team + TEAM.threads) * ROW_CHUNKS_A_THREAD
    if tokens > 1:
        shares *= CHUNKS_OF_MANY
    return max(step, rows // shares // step * step)


@inner
def multiply_expert(matrix, source, one_row, entry, first, last, out, out_stride, scratch):
    """Rows first..last of an expert's matrix times its rows of `source`, without bias; `one_row`: source has
    only one row.
    """
    expert = load_i64(entry)
    start = load_i64(entry + 8)
    pairs = load_i64(entry + 16)
    activations, stride = operands(matrix, source)
    call_pointer_10(
        kernel_for(matrix, source, pairs),
        load_i64(matrix + MATRIX.weights) + expert * load_i64(matrix + MATRIX.expert_stride),
        load_i64(matrix + MATRIX.columns),
        first,
        last,
        activations if one_row else activations + start * stride,
        stride,
        pairs,
        out + start * out_stride,
        out_stride,
        scratch,
    )


@inner
def project_experts(team, counter, block, tokens, matrix, source, out, out_stride, scratch):
    """Phase: out[row] = matrix of the row's expert · source[row], in chunks of an expert's rows. If source is
    the normed row of a single token, all pairs use it.
    """
    one_row = source == load_i64(block + EXPERTS.normed)
    rows = load_i64(matrix + MATRIX.rows)
    active = active_count(block)
    chunk = chunk_of(team, rows * active, tokens)
    chunks = (rows + chunk - 1) // chunk
    while True:
        item = next_item(team, counter)
        if item >= active * chunks:
            break
        index = item // chunks
        first = (item - index * chunks) * chunk
        entry = entry_at(block, index)
        last = min(rows, first + chunk)
        multiply_expert(matrix, source, one_row, entry, first, last, out, out_stride, scratch)


@inner
def add_expert_bias(value, matrix, expert, i):
    """Sixteen values of a projected row plus the bias of its expert."""
    bias = load_i64(matrix + MATRIX.bias)
    if bias != 0:
        value = add(value, load_floats(bias + expert * load_i64(matrix + MATRIX.bias_stride) + 4 * i))
    return value


@inner
def activate_experts(team, counter, block, tokens):
    """Phase: hidden = activation(gate)·up of every pair, in the input format of W_down; in pieces."""
    hidden = load_i64(block + EXPERTS.hidden)
    gate_matrix = load_i64(block + EXPERTS.gate_matrix)
    up_matrix = load_i64(block + EXPERTS.up_matrix)
    code = load_i64(block + EXPERTS.activation)
    columns = load_i64(hidden + INPUT.columns)
    stride = load_i64(hidden + INPUT.float_stride)
    pairs = tokens * load_i64(block + EXPERTS.used)
    while True:
        pair, first, last = next_piece(team, counter, columns)
        if pair >= pairs:
            break
        place = load_i64(load_i64(block + EXPERTS.places) + 8 * pair)
        if place < 0:
            continue
        entry = entry_at(block, load_i64(load_i64(block + EXPERTS.entries) + 8 * pair))
        expert = load_i64(entry)
        start = load_i64(entry + 8)
        up = load_i64(hidden + INPUT.floats) + place * stride
        gate = load_i64(block + EXPERTS.gate) + place * stride
        for i in range(first, last, 16):
            gated = add_expert_bias(load_floats(gate + 4 * i), gate_matrix, expert, i)
            value = add_expert_bias(load_floats(up + 4 * i), up_matrix, expert, i)
            store_floats(up + 4 * i, activate_gated(code, gated, value))
        write_activations_from(up, hidden, start, place - start, load_i64(entry + 16), first, last)


@inner
def shared_weight(block, token):
    """The weight of the shared expert for a token: 1, or the sigmoid of its router."""
    router = load_i64(block + EXPERTS.shared_router)
    if router == 0:
        return np.float32(1)
    normed = load_i64(block + EXPERTS.normed)
    row = load_i64(normed + INPUT.floats) + token * load_i64(normed + INPUT.float_stride)
    padded = load_i64(load_i64(block + EXPERTS.norm) + NORM.padded)
    return lanes_max(sigmoid(splat_f32(sum_of_products(row, router, padded))))


@inner
def combine_columns(block, token, x, first, last):
    """x += scale · (Σ weight · (out + bias) + weight · shared) for columns first..last of a token."""
    used = load_i64(block + EXPERTS.used)
    scale = splat_f32(load_f32(block + EXPERTS.residual_scale))
    down = load_i64(block + EXPERTS.down_matrix)
    out = load_i64(block + EXPERTS.out)
    out_stride = load_i64(block + EXPERTS.out_stride)
    places = load_i64(block + EXPERTS.places) + 8 * used * token
    ids = load_i64(block + EXPERTS.ids) + token * load_i64(block + EXPERTS.ids_stride)
    weights = load_i64(block + EXPERTS.weights) + 4 * used * token
    shared = load_i64(block + EXPERTS.shared_up_matrix) != 0
    shared_row = load_i64(block + EXPERTS.shared_out) + token * load_i64(block + EXPERTS.shared_out_stride)
    factor = splat_f32(np.float32(0))
    if shared:
        factor = splat_f32(shared_weight(block, token))
    for i in range(first, last, 16):
        total = splat_f32(np.float32(0))
        for slot in range(used):
            place = load_i64(places + 8 * slot)
            if place < 0:
                continue
            row = out + place * out_stride
            value = add_expert_bias(load_floats(row + 4 * i), down, load_i64(ids + 8 * slot), i)
            total = multiply_add(value, splat_f32(load_f32(weights + 4 * slot)), total)
        if shared:
            total = add(total, multiply(load_floats(shared_row + 4 * i), factor))
        store_floats(x + 4 * i, multiply_add(total, scale, load_floats(x + 4 * i)))


@inner
def combine(team, counter, block, call):
    """Phase: add the experts' results to the residual, in pieces of columns."""
    padded = load_i64(load_i64(block + EXPERTS.norm) + NORM.padded)
    while True:
        token, first, last = next_piece(team, counter, padded)
        if token >= load_i64(call + CALL.tokens):
            break
        x = load_i64(call + CALL.x) + token * load_i64(call + CALL.x_stride)
        combine_columns(block, token, x, first, last)


@inner
def score(team, counter, thread, block, tokens, source, scratch):
    """Phase: the router's scores of the rows of `source`, without bias."""
    scores = load_i64(block + EXPERTS.scores)
    stride = load_i64(block + EXPERTS.scores_stride)
    project(team, counter, thread, tokens, load_i64(block + EXPERTS.router), source, scores, stride, scratch)


@inner
def scratch_of(block, thread):
    return load_i64(block + EXPERTS.scratch) + thread * load_i64(block + EXPERTS.scratch_stride)


@exports.add("route_block", 4)
def route_block(block, call, team, thread):
    """Compute the scores of a pre-attention router, which reads the layer's input."""
    source = load_i64(block + EXPERTS.router_input)
    normalize_and_quantize(team, 0, thread, call, load_i64(block + EXPERTS.router_norm), source)
    barrier(team)
    score(team, 1, thread, block, load_i64(call + CALL.tokens), source, scratch_of(block, thread))


@inner
def place_pairs(team, block, tokens, scratch):
    """Counters 3 and 4: assign rows to the pairs and, for several tokens, fill them."""
    if next_item(team, 3) == 0:
        sort_by_expert(block, tokens, scratch)
    barrier(team)
    if tokens > 1:
        gather(team, 4, block, tokens)
        barrier(team)


@inner
def project_shared(team, thread, block, tokens, normed, scratch):
    """Counters 7 and 8: gate and up of the shared expert."""
    hidden = load_i64(block + EXPERTS.shared_hidden)
    stride = load_i64(hidden + INPUT.float_stride)
    gate = load_i64(block + EXPERTS.shared_gate)
    up = load_i64(hidden + INPUT.floats)
    gate_matrix = load_i64(block + EXPERTS.shared_gate_matrix)
    project(team, 7, thread, tokens, gate_matrix, normed, gate, stride, scratch)
    up_matrix = load_i64(block + EXPERTS.shared_up_matrix)
    project(team, 8, thread, tokens, up_matrix, normed, up, stride, scratch)


@inner
def activate_shared(team, block, tokens):
    """Counter 10: hidden rows of the shared expert."""
    activate_and_quantize(
        team,
        10,
        tokens,
        load_i64(block + EXPERTS.activation),
        load_i64(block + EXPERTS.shared_gate_matrix),
        load_i64(block + EXPERTS.shared_up_matrix),
        load_i64(block + EXPERTS.shared_gate),
        load_i64(block + EXPERTS.shared_hidden),
    )


@inner
def finish_shared(team, thread, block, tokens, scratch):
    """Counter 12: results of the shared expert."""
    out = load_i64(block + EXPERTS.shared_out)
    stride = load_i64(block + EXPERTS.shared_out_stride)
    hidden = load_i64(block + EXPERTS.shared_hidden)
    down = load_i64(block + EXPERTS.shared_down_matrix)
    project(team, 12, thread, tokens, down, hidden, out, stride, scratch)


@exports.add("experts_block", 4)
def experts_block(block, call, team, thread):
    """x += scale · Σ weight · expert(norm(x)), plus the shared expert, for the tokens of `call`."""
    scratch = scratch_of(block, thread)
    normed = load_i64(block + EXPERTS.normed)
    normalize_and_quantize(team, 0, thread, call, load_i64(block + EXPERTS.norm), normed)
    barrier(team)
    if load_i64(block + EXPERTS.early) == 0:
        score(team, 1, thread, block, load_i64(call + CALL.tokens), normed, scratch)
        barrier(team)
    choose(team, 2, block, call, scratch)
    barrier(team)
    add_experts(team, thread, block, call, scratch)


@exports.add("chosen_experts_block", 4)
def chosen_experts_block(block, call, team, thread):
    """`experts_block` after a device has selected the experts: `ids` and `weights` are given, and there is no
    shared expert.
    """
    scratch = scratch_of(block, thread)
    normed = load_i64(block + EXPERTS.normed)
    normalize_and_quantize(team, 0, thread, call, load_i64(block + EXPERTS.norm), normed)
    add_experts(team, thread, block, call, scratch)


@inner
def add_experts(team, thread, block, call, scratch):
    """Counters 3 to 13: from the selected experts to their results in x; starts with a barrier."""
    tokens = load_i64(call + CALL.tokens)
    normed = load_i64(block + EXPERTS.normed)
    hidden = load_i64(block + EXPERTS.hidden)
    hidden_stride = load_i64(hidden + INPUT.float_stride)
    gate = load_i64(block + EXPERTS.gate)
    up = load_i64(hidden + INPUT.floats)
    out = load_i64(block + EXPERTS.out)
    out_stride = load_i64(block + EXPERTS.out_stride)
    shared = load_i64(block + EXPERTS.shared_up_matrix) != 0
    place_pairs(team, block, tokens, scratch)
    source = load_i64(block + EXPERTS.gathered) if tokens > 1 else normed
    gate_matrix = load_i64(block + EXPERTS.gate_matrix)
    up_matrix = load_i64(block + EXPERTS.up_matrix)
    project_experts(team, 5, block, tokens, gate_matrix, source, gate, hidden_stride, scratch)
    project_experts(team, 6, block, tokens, up_matrix, source, up, hidden_stride, scratch)
    if shared:
        project_shared(team, thread, block, tokens, normed, scratch)
    barrier(team)
    activate_experts(team, 9, block, tokens)
    if shared:
        activate_shared(team, block, tokens)
    barrier(team)
    down = load_i64(block + EXPERTS.down_matrix)
    project_experts(team, 11, block, tokens, down, hidden, out, out_stride, scratch)
    if shared:
        finish_shared(team, thread, block, tokens, scratch)
    barrier(team)
    combine(team, 13, block, call)
