"""The MoE block: router, experts of each token, their feed-forwards, weighted sum.

Token-expert assignments are sorted by expert, so that the rows of an expert are read once for all its tokens.
Work is distributed as (expert in use, chunk of rows), in chunks small enough to keep all threads busy even
with few experts. With one token, its quantized row is read in place.
"""

import numpy as np

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.native.blocks.feed_forward import activate_and_quantize
from edgeinfer_kernels.cpu.native.blocks.phases import (
    ROW_CHUNKS_PER_THREAD,
    ROWS_PER_PAIR,
    kernel_for,
    next_piece,
    normalize_and_quantize,
    operands,
    project,
    quantize_input,
    scale_rows,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier, next_item
from edgeinfer_kernels.cpu.native.gemv.lora import add_lora, lora_products
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations, write_activations_from
from edgeinfer_kernels.cpu.native.moe.expert_sums import (
    add_expert_bias,
    combine,
    combine_normed,
    project_latent_back,
)
from edgeinfer_kernels.cpu.native.moe.routing import select_experts, sort_by_expert
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import call_pointer_10, load_f32, load_i64
from edgeinfer_kernels.cpu.native.simd.vector_math import activate, activate_gated
from edgeinfer_kernels.cpu.runtime.experts_args import ExpertsArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

CHUNKS_OF_MANY = 4
"""Factor of the chunk count if experts have different numbers of tokens."""

exports = Exports()


@device_function
def gather(pool, counter, block, tokens):
    """Phase: copy the row that each assignment's expert reads to its index, in the format for the expert's
    number of assignments.
    """
    experts_per_token = block.experts_per_token
    source = block.expert_input
    gathered = block.gathered
    columns = source.columns
    copies = gathered.floats
    while True:
        assignment = next_item(pool, counter)
        if assignment >= tokens * experts_per_token:
            break
        row = source.floats + assignment // experts_per_token * source.float_stride
        row_index = load_i64(block.assignment_rows + 8 * assignment)
        if row_index < 0:
            continue
        entry = block.active.experts[load_i64(block.entries + 8 * assignment)]
        start = entry.first_row
        assignments = entry.assignments
        write_activations_from(row, gathered, start, row_index - start, assignments, 0, columns)
        if copies != 0:
            target = copies + row_index * gathered.float_stride
            for i in range(0, columns, 16):
                store_floats(target + 4 * i, load_floats(row + 4 * i))


@device_function
def chunk_of(pool, rows, tokens):
    """Rows per chunk, out of `rows` in all experts in use."""
    step = ROWS_PER_PAIR if tokens > 1 else ROWS_PER_GROUP
    shares = pool.threads * ROW_CHUNKS_PER_THREAD
    if tokens > 1:
        shares *= CHUNKS_OF_MANY
    return max(step, rows // shares // step * step)


@device_function
def multiply_expert(thread, matrix, source, one_row, entry, first, last, out, out_stride, scratch):
    """Rows first..last of an expert's matrix times its rows of `source`, without bias; `one_row`: source has
    only one row.
    """
    expert = entry.expert
    start = entry.first_row
    assignments = entry.assignments
    activations, stride = operands(matrix, source)
    call_pointer_10(
        kernel_for(matrix, source, assignments),
        matrix.weights + expert * matrix.expert_stride,
        matrix.columns,
        first,
        last,
        activations if one_row else activations + start * stride,
        stride,
        assignments,
        out + start * out_stride,
        out_stride,
        scratch,
    )
    scale_rows(matrix, expert, first, last, assignments, out + start * out_stride, out_stride)
    lora = matrix.lora
    if lora.address != 0:
        rows = source.floats if one_row else source.floats + start * source.float_stride
        products = lora_products(lora, expert, thread, 0, rows, source.float_stride, assignments)
        add_lora(lora, expert, products, first, last, assignments, out + start * out_stride, out_stride)


@device_function
def project_experts(pool, counter, thread, block, tokens, matrix, source, out, out_stride, scratch):
    """Phase: out[row] = matrix of the row's expert · source[row], in chunks of an expert's rows. If source is
    the row of a single token, all assignments use it.
    """
    one_row = source.address == block.expert_input.address
    rows = matrix.rows
    active = block.active.count
    chunk = chunk_of(pool, rows * active, tokens)
    chunks = (rows + chunk - 1) // chunk
    while True:
        item = next_item(pool, counter)
        if item >= active * chunks:
            break
        index = item // chunks
        first = (item - index * chunks) * chunk
        entry = block.active.experts[index]
        last = min(rows, first + chunk)
        multiply_expert(thread, matrix, source, one_row, entry, first, last, out, out_stride, scratch)


@device_function
def activate_assignment(block, assignment, row_index, first, last):
    """hidden = activation(gate)·up of an assignment's neurons first..last, or activation(up) without a gate,
    in the input format of W_down.
    """
    hidden = block.hidden
    gate_matrix = block.gate_matrix
    up_matrix = block.up_matrix
    code = block.activation
    stride = hidden.float_stride
    entry = block.active.experts[load_i64(block.entries + 8 * assignment)]
    expert = entry.expert
    start = entry.first_row
    up = hidden.floats + row_index * stride
    gate = block.gate + row_index * stride
    weight = np.float32(1)
    if block.weighted_input != 0:
        weight = load_f32(block.weights + 4 * assignment)
    factor = splat_f32(weight)
    for i in range(first, last, 16):
        value = add_expert_bias(multiply(load_floats(up + 4 * i), factor), up_matrix, expert, i)
        if gate_matrix.address != 0:
            gated = multiply(load_floats(gate + 4 * i), factor)
            gated = add_expert_bias(gated, gate_matrix, expert, i)
            value = activate_gated(code, gated, value)
        else:
            value = activate(code, value)
        store_floats(up + 4 * i, value)
    write_activations_from(up, hidden, start, row_index - start, entry.assignments, first, last)


@device_function
def activate_experts(pool, counter, block, tokens):
    """Phase: the hidden rows of every assignment, in pieces."""
    hidden = block.hidden
    assignments = tokens * block.experts_per_token
    while True:
        assignment, first, last = next_piece(pool, counter, hidden.columns)
        if assignment >= assignments:
            break
        row_index = load_i64(block.assignment_rows + 8 * assignment)
        if row_index >= 0:
            activate_assignment(block, assignment, row_index, first, last)


@device_function
def score(pool, counter, thread, block, tokens, source, scratch):
    """Phase: the router's scores of the rows of `source`, without bias."""
    scores = block.scores
    stride = block.scores_stride
    project(pool, counter, thread, tokens, block.router, source, scores, stride, scratch)


@device_function
def project_latent(pool, thread, block, step_args, scratch):
    """Counter 14: the latent projection of the normed rows, which the experts read, if there is one."""
    matrix = block.latent_down
    if matrix.address != 0:
        target = block.expert_input
        rows, stride = target.floats, target.float_stride
        project(pool, 14, thread, step_args.tokens, matrix, block.normed, rows, stride, scratch)


@device_function
def quantize_latent(pool, block, step_args):
    """Counter 15: its rows in the input formats of the experts."""
    if block.latent_down.address != 0:
        quantize_input(pool, 15, step_args, block.expert_input)


@device_function
def scratch_of(block, thread):
    return block.scratch + thread * block.scratch_stride


@exports.add("route_block", ExpertsArgs, StepArgs, ThreadPoolArgs, int)
def route_block(block, step_args, pool, thread):
    """Compute the scores of a pre-attention router, which reads the layer's input."""
    source = block.router_input
    normalize_and_quantize(pool, 0, thread, step_args, block.router_norm, source)
    barrier(pool, thread)
    score(pool, 1, thread, block, step_args.tokens, source, scratch_of(block, thread))


@device_function
def assign_rows(pool, thread, block, tokens, scratch):
    """Counters 3 and 4: assign rows to the assignments and, for several tokens, fill them."""
    if next_item(pool, 3) == 0:
        sort_by_expert(block, tokens, scratch)
    barrier(pool, thread)
    if tokens > 1:
        gather(pool, 4, block, tokens)
        barrier(pool, thread)


@device_function
def scale_shared_input(pool, counter, block, tokens):
    """Phase: the rows that the shared expert reads, if they are normed rows with factors."""
    gain = block.shared_gain
    if gain == 0:
        return
    normed, target = block.normed, block.shared_input
    while True:
        token, first, last = next_piece(pool, counter, target.columns)
        if token >= tokens:
            break
        source = normed.floats + token * normed.float_stride
        row = target.floats + token * target.float_stride
        for i in range(first, last, 16):
            store_floats(row + 4 * i, multiply(load_floats(source + 4 * i), load_floats(gain + 4 * i)))
        write_activations(row, target, token, tokens, first, last)


@device_function
def project_shared(pool, thread, block, tokens, normed, scratch):
    """Counters 7 and 8: gate and up of the shared expert."""
    hidden = block.shared_hidden
    stride = hidden.float_stride
    gate = block.shared_gate
    up = hidden.floats
    gate_matrix = block.shared_gate_matrix
    if gate_matrix.address != 0:
        project(pool, 7, thread, tokens, gate_matrix, normed, gate, stride, scratch)
    up_matrix = block.shared_up_matrix
    project(pool, 8, thread, tokens, up_matrix, normed, up, stride, scratch)


@device_function
def activate_shared(pool, block, tokens):
    """Counter 10: hidden rows of the shared expert."""
    activate_and_quantize(
        pool,
        10,
        tokens,
        block.shared_activation,
        block.shared_gate_matrix,
        block.shared_up_matrix,
        block.shared_gate,
        block.shared_hidden,
    )


@device_function
def finish_shared(pool, thread, block, tokens, scratch):
    """Counter 12: results of the shared expert."""
    out = block.shared_out
    stride = block.shared_out_stride
    hidden = block.shared_hidden
    down = block.shared_down_matrix
    project(pool, 12, thread, tokens, down, hidden, out, stride, scratch)


@device_function
def route(pool, thread, block, step_args, scratch):
    """Counters 0 to 2, 14 and 15: from x to the selected experts and what they read; ends with a barrier."""
    normed = block.normed
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    barrier(pool, thread)
    if block.pre_attention_router == 0:
        score(pool, 1, thread, block, step_args.tokens, normed, scratch)
        scale_shared_input(pool, 14, block, step_args.tokens)
        project_latent(pool, thread, block, step_args, scratch)
        barrier(pool, thread)
    select_experts(pool, 2, block, step_args, scratch)
    quantize_latent(pool, block, step_args)
    barrier(pool, thread)


@device_function
def read_selected(pool, thread, block, step_args, scratch):
    """As `route`, after a device has selected the experts; without a barrier at the end."""
    normed = block.normed
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    if block.latent_down.address != 0:
        barrier(pool, thread)
        project_latent(pool, thread, block, step_args, scratch)
        barrier(pool, thread)
        quantize_latent(pool, block, step_args)


@exports.add("experts_block", ExpertsArgs, StepArgs, ThreadPoolArgs, int)
def experts_block(block, step_args, pool, thread):
    """x += scale · Σ weight · expert(norm(x)), plus the shared expert, for the tokens of `step_args`."""
    scratch = scratch_of(block, thread)
    route(pool, thread, block, step_args, scratch)
    add_experts(pool, thread, block, step_args, scratch)


@exports.add("selected_experts_block", ExpertsArgs, StepArgs, ThreadPoolArgs, int)
def selected_experts_block(block, step_args, pool, thread):
    """`experts_block` after a device has selected the experts: `ids` and `weights` are given, and there is no
    shared expert.
    """
    scratch = scratch_of(block, thread)
    read_selected(pool, thread, block, step_args, scratch)
    add_experts(pool, thread, block, step_args, scratch)


@device_function
def add_experts(pool, thread, block, step_args, scratch):
    """Counters 3 to 13 (with a latent projection also 0 and 1): from the selected experts to their results in
    x; starts with a barrier.
    """
    tokens = step_args.tokens
    hidden = block.hidden
    hidden_stride = hidden.float_stride
    gate = block.gate
    up = hidden.floats
    out = block.out
    out_stride = block.out_stride
    shared = block.shared_up_matrix.address != 0
    assign_rows(pool, thread, block, tokens, scratch)
    source = block.gathered if tokens > 1 else block.expert_input
    gate_matrix = block.gate_matrix
    up_matrix = block.up_matrix
    if gate_matrix.address != 0:
        project_experts(pool, 5, thread, block, tokens, gate_matrix, source, gate, hidden_stride, scratch)
    project_experts(pool, 6, thread, block, tokens, up_matrix, source, up, hidden_stride, scratch)
    if shared:
        project_shared(pool, thread, block, tokens, block.shared_input, scratch)
    barrier(pool, thread)
    activate_experts(pool, 9, block, tokens)
    if shared:
        activate_shared(pool, block, tokens)
    barrier(pool, thread)
    down = block.down_matrix
    project_experts(pool, 11, thread, block, tokens, down, hidden, out, out_stride, scratch)
    if shared:
        finish_shared(pool, thread, block, tokens, scratch)
    add_results(pool, thread, block, step_args, scratch)


@device_function
def add_results(pool, thread, block, step_args, scratch):
    """Counter 13 (with a latent projection also 0 and 1): the experts' results to x; starts with a
    barrier.
    """
    barrier(pool, thread)
    if block.latent_up.address != 0:
        project_latent_back(pool, thread, block, step_args, scratch)
    if block.post_norm.address != 0:
        combine_normed(pool, 13, block, step_args)
    else:
        combine(pool, 13, block, step_args)
