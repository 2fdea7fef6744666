"""The experts of a ReLU MoE for a few tokens: inactive neurons cost only their detection.

Gate is computed first (up, without a gate), for pieces of an expert's neurons and all tokens that use it.
Then up is computed for the active ones, row by row. These steps are one phase: a thread processes a piece
completely. Down is summed over the active neurons, in pieces of an assignment's outputs and in the order of
the dense block: without a gate the result is bit-equal to it, and it doesn't depend on the threads.
"""

from edgeinfer_kernels.cpu.native.blocks.experts import (
    activate_assignment,
    activate_shared,
    add_experts,
    add_results,
    assign_rows,
    finish_shared,
    multiply_expert,
    project_shared,
    read_selected,
    route,
    scratch_of,
)
from edgeinfer_kernels.cpu.native.blocks.phases import ROW_CHUNKS_PER_THREAD
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier, next_item
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import call_pointer_10, load_i64
from edgeinfer_kernels.cpu.native.sparse.neuron_lists import (
    fill_row,
    list_positive,
    prefetch_first_rows,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_rows import activations_by_lanes
from edgeinfer_kernels.cpu.runtime.abi import (
    LISTS_BYTES,
    MAX_NEURONS_PER_PIECE,
    NEURONS_PER_BLOCK,
    OUTPUTS_PER_TILE,
    SPARSE_SCRATCH,
    SPARSE_TOKENS,
)
from edgeinfer_kernels.cpu.runtime.experts_args import ExpertsArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def piece_of(pool, neurons):
    """Neurons of a piece, out of `neurons` in all experts in use."""
    share = neurons // (pool.threads * ROW_CHUNKS_PER_THREAD) // NEURONS_PER_BLOCK * NEURONS_PER_BLOCK
    return min(max(NEURONS_PER_BLOCK, share), MAX_NEURONS_PER_PIECE)


@device_function
def compute_up(block, token, expert, row_index, first, last, own):
    """Compute an assignment's up of the neurons first…last whose gate is positive; 0 for the others."""
    sparse = block.sparse
    hidden = block.hidden
    gate_matrix = block.gate_matrix
    gate = block.gate + row_index * hidden.float_stride
    up = hidden.floats + row_index * hidden.float_stride
    bias = gate_matrix.bias
    if bias != 0:
        bias += expert * gate_matrix.bias_stride
    count = list_positive(gate, bias, first, last, own)
    rows = sparse.up_rows
    weights = rows.weights + expert * sparse.up_stride
    prefetch_first_rows(rows, weights, own, count, 0)
    fill_row(up, first, last, 0)
    lanes = own + SPARSE_SCRATCH + token * sparse.lanes_stride
    call_pointer_10(rows.kernel, weights, rows.groups, rows.row_bytes, 0, own, count, lanes, up, weights, 0)


@device_function
def neurons_phase(pool, counter, thread, block, tokens, own, scratch):
    """Phase: from what the experts read to their hidden rows, in pieces of an expert's neurons."""
    hidden = block.hidden
    matrix, out = block.gate_matrix, block.gate
    is_gated = matrix.address != 0
    if not is_gated:
        matrix, out = block.up_matrix, hidden.floats
    source = block.gathered if tokens > 1 else block.expert_input
    one_row = tokens == 1
    active = block.active.count
    neurons = hidden.columns
    piece = piece_of(pool, active * neurons)
    pieces = (neurons + piece - 1) // piece
    while True:
        item = next_item(pool, counter)
        if item >= active * pieces:
            break
        index = item // pieces
        first = (item - index * pieces) * piece
        last = min(neurons, first + piece)
        entry = block.active.experts[index]
        stride = hidden.float_stride
        multiply_expert(thread, matrix, source, one_row, entry, first, last, out, stride, scratch)
        for assignment in range(tokens * block.experts_per_token):
            row_index = load_i64(block.assignment_rows + 8 * assignment)
            if row_index < 0 or load_i64(block.entries + 8 * assignment) != index:
                continue
            if is_gated:
                token = assignment // block.experts_per_token
                compute_up(block, token, entry.expert, row_index, first, last, own)
            activate_assignment(block, assignment, row_index, first, last)


@device_function
def down_phase(pool, counter, block, tokens, own):
    """Phase: the sums over the active neurons of every assignment, in pieces of its outputs."""
    sparse = block.sparse
    hidden = block.hidden
    down = sparse.down
    assignments = tokens * block.experts_per_token
    shares = (pool.threads * ROW_CHUNKS_PER_THREAD + assignments - 1) // assignments
    parts = min(shares, down.outputs // OUTPUTS_PER_TILE)
    while True:
        item = next_item(pool, counter)
        if item >= assignments * parts:
            break
        assignment = item // parts
        row_index = load_i64(block.assignment_rows + 8 * assignment)
        if row_index < 0:
            continue
        expert = block.active.experts[load_i64(block.entries + 8 * assignment)].expert
        call_pointer_10(
            down.kernel,
            down[expert].address,
            item - assignment * parts,
            parts,
            hidden.quantized + row_index * hidden.quantized_stride,
            hidden.quantized_stride,
            1,
            block.out + row_index * block.out_stride,
            block.out_stride,
            own + LISTS_BYTES,
            1,
        )


@device_function
def add_sparse_experts(pool, thread, block, step_args, scratch):
    """As `add_experts`; for at most SPARSE_TOKENS tokens only the active neurons. Counters 3 to 13, with
    a latent projection also 0 and 1.
    """
    tokens = step_args.tokens
    if tokens > SPARSE_TOKENS:
        add_experts(pool, thread, block, step_args, scratch)
        return
    sparse = block.sparse
    own = sparse.scratch + thread * sparse.scratch_stride
    shared = block.shared_up_matrix.address != 0
    assign_rows(pool, thread, block, tokens, scratch)
    source = block.expert_input
    if block.gate_matrix.address != 0:
        for token in range(tokens):
            lanes = own + SPARSE_SCRATCH + token * sparse.lanes_stride
            row = source.quantized + token * source.quantized_stride
            activations_by_lanes(row, source.columns, lanes)
    neurons_phase(pool, 5, thread, block, tokens, own, scratch)
    if shared:
        project_shared(pool, thread, block, tokens, block.shared_input, scratch)
    barrier(pool, thread)
    down_phase(pool, 11, block, tokens, own)
    if shared:
        activate_shared(pool, block, tokens)
        barrier(pool, thread)
        finish_shared(pool, thread, block, tokens, scratch)
    add_results(pool, thread, block, step_args, scratch)


@exports.add("sparse_experts_block", ExpertsArgs, StepArgs, ThreadPoolArgs, int)
def sparse_experts_block(block, step_args, pool, thread):
    """As `experts_block`; for at most SPARSE_TOKENS tokens, with only the active neurons."""
    scratch = scratch_of(block, thread)
    route(pool, thread, block, step_args, scratch)
    add_sparse_experts(pool, thread, block, step_args, scratch)


@exports.add("sparse_selected_experts_block", ExpertsArgs, StepArgs, ThreadPoolArgs, int)
def sparse_selected_experts_block(block, step_args, pool, thread):
    """As `selected_experts_block`; for at most SPARSE_TOKENS tokens, with only the active neurons."""
    scratch = scratch_of(block, thread)
    read_selected(pool, thread, block, step_args, scratch)
    add_sparse_experts(pool, thread, block, step_args, scratch)
