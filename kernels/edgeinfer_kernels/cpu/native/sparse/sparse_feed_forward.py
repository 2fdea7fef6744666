"""The feed-forward block of ReLU models for a few tokens: inactive neurons cost only their detection.

Gate is computed first (up, without a gate), for all neurons or only for those that a predictor selects. Then
up is computed for the active ones. These steps are one phase: a thread processes a piece of the neurons
completely, so no thread waits for a list. If the neurons are on disk, gate is computed for all pieces first,
and the bundles of the active neurons are read. Then each thread adds up down for its part of the neurons, and
the sums of the threads are added. Without a gate and a predictor everything before is bit-equal to the dense
block: each thread then adds up its part of the outputs in that block's order, so that the result is too.
"""

from edgeinfer_kernels.cpu.native.blocks.feed_forward import activate_piece, feed_forward_block
from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_piece,
    add_residual,
    multiply_rows,
    normalize_and_quantize,
    normalize_rows,
    operands,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier, barrier_and_clear, next_item
from edgeinfer_kernels.cpu.native.disk.bundle_window import take_bundles
from edgeinfer_kernels.cpu.native.simd.byte_lanes import nonzero_bytes
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import (
    call_pointer_10,
    count_ones,
    store_i8,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_lists import (
    continue_list,
    fill_row,
    list_positive,
    multiply_listed_rows,
    prefetch_first_rows,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_parts import part_of_outputs
from edgeinfer_kernels.cpu.native.sparse.neuron_prediction import (
    piece_of,
    predict_phase,
    prefetch_biases,
    prefetch_predictor,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_rows import activations_by_lanes
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATION_BYTES,
    LIST_BYTES,
    NEURONS_PER_BLOCK,
    ROWS_AHEAD,
    SPARSE_SCRATCH,
    SPARSE_TOKENS,
)
from edgeinfer_kernels.cpu.runtime.block_args import SparseArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

INACTIVE = -1e30
"""The projection of a neuron that is not computed: ReLU maps it to 0 for any bias."""

exports = Exports()


@device_function
def find_neurons(block, dense, tokens, first, last, dense_scratch, own):
    """Compute gate (or up) of a piece of the neurons: all of them, or those that the predictor selects."""
    hidden = dense.hidden
    matrix, out = block.predictor_second, dense.gate
    activations, times = own + block.predicted_offset, block.predicted_quantized_stride
    if matrix.address == 0:
        matrix = dense.gate_matrix
        if matrix.address == 0:
            matrix, out = dense.up_matrix, hidden.floats
        activations, times = operands(matrix, dense.normed)
    stride = hidden.float_stride
    kernel = matrix.kernel
    multiply_rows(kernel, matrix, first, last, activations, times, tokens, out, stride, dense_scratch)


@device_function
def first_rows(block):
    """The rows of a token's first list: those of gate if a predictor selects them, else those of up."""
    if block.gate_rows.address != 0:
        return block.gate_rows
    return block.up_rows


@device_function
def list_first(block, dense, token, first, last, neurons):
    """List a token's neurons first…last whose rows are read first: those that the predictor selects, without
    one those whose gate is positive. Return their number.
    """
    hidden, gate_matrix = dense.hidden, dense.gate_matrix
    gate, up = dense.gate + token * hidden.float_stride, hidden.floats + token * hidden.float_stride
    if block.predictor_second.address != 0:
        count = list_positive(gate, block.predictor_bias, first, last, neurons)
        fill_row(gate if gate_matrix.address != 0 else up, first, last, INACTIVE)
        return count
    if gate_matrix.address != 0:
        count = list_positive(gate, gate_matrix.bias, first, last, neurons)
        fill_row(up, first, last, 0)
        return count
    return 0


@device_function
def multiply_gate(block, dense, token, first, last, neurons, count, active, own):
    """Multiply the gate rows of a list, and list the neurons whose gate is positive as `active`. Return their
    number.
    """
    hidden, gate_matrix = dense.hidden, dense.gate_matrix
    gate, up = dense.gate + token * hidden.float_stride, hidden.floats + token * hidden.float_stride
    lanes = own + SPARSE_SCRATCH + token * block.lanes_stride
    continue_list(neurons, count, neurons, count)  # Most of them are positive.
    multiply_listed_rows(block.gate_rows, neurons, count, lanes, gate, block.up_rows)
    count = list_positive(gate, gate_matrix.bias, first, last, active)
    prefetch_first_rows(block.up_rows, block.up_rows.weights, active, count, 0)
    fill_row(up, first, last, 0)
    return count


@device_function
def multiply_up(block, dense, token, neurons, count, own):
    """Multiply the rows of up of a list."""
    hidden = dense.hidden
    lanes = own + SPARSE_SCRATCH + token * block.lanes_stride
    up = hidden.floats + token * hidden.float_stride
    multiply_listed_rows(block.up_rows, neurons, count, lanes, up, first_rows(block))


@device_function
def count_active(block, dense, token, first, last):
    """Count the active neurons of each block of 32 of first…last."""
    hidden = dense.hidden
    counts = block.down.counts + token * block.down.counts_stride
    row = hidden.quantized + token * hidden.quantized_stride
    for index in range(first // NEURONS_PER_BLOCK, last // NEURONS_PER_BLOCK):
        store_i8(counts + index, count_ones(nonzero_bytes(row + ACTIVATION_BYTES * index)))


@device_function
def activate_neurons(block, dense, token, tokens, first, last):
    """hidden = activation(gate)·up, or activation(up), of the neurons first…last, in the input format of
    down.
    """
    hidden = dense.hidden
    stride = hidden.float_stride
    gate = dense.gate + token * stride
    up = hidden.floats + token * stride
    gate_matrix = dense.gate_matrix
    up_matrix = dense.up_matrix
    code = dense.activation
    activate_piece(code, gate_matrix, up_matrix, gate, up, hidden, token, tokens, first, last)
    count_active(block, dense, token, first, last)


@device_function
def neurons_phase(pool, counter, thread, block, dense, tokens, dense_scratch, own):
    """Phase: from the normed x to the hidden activations, in pieces of the neurons; with a window their gate
    is computed already.

    The rows of a list are scattered, and the first ones of a short list are waited for. So the next list is
    made, and its first rows prefetched, before the rows of the one before it are multiplied.
    """
    has_gate_rows = block.gate_rows.address != 0
    in_memory = block.window.address == 0
    listed, other = own, own + LIST_BYTES
    first, last = piece_of(thread, block, dense)
    if in_memory and first < last:
        find_neurons(block, dense, tokens, first, last, dense_scratch, own)
    count = list_first(block, dense, 0, first, last, listed)
    rows = first_rows(block)
    if rows.address != 0:
        prefetch_first_rows(rows, rows.weights, listed, count, 0)
    while first < last:
        item = pool.threads + next_item(pool, counter)
        next_first, next_last = piece_of(item, block, dense)
        prefetch_biases(block, dense, next_first, next_last)
        for token in range(tokens):
            if has_gate_rows:
                count = multiply_gate(block, dense, token, first, last, listed, count, other, own)
                listed, other = other, listed
            following = 0
            if token + 1 < tokens:
                following = list_first(block, dense, token + 1, first, last, other)
            elif next_first < next_last:
                if in_memory:
                    find_neurons(block, dense, tokens, next_first, next_last, dense_scratch, own)
                following = list_first(block, dense, 0, next_first, next_last, other)
            if rows.address != 0:
                continue_list(listed, count, other, following)
                prefetch_first_rows(rows, rows.weights, other, following, min(count, ROWS_AHEAD))
                multiply_up(block, dense, token, listed, count, own)
            activate_neurons(block, dense, token, tokens, first, last)
            listed, other = other, listed
            count = following
        first, last = next_first, next_last


@device_function
def find_phase(pool, counter, block, dense, tokens, dense_scratch, own):
    """Phase: find the active neurons of all pieces, whose bundles are on disk."""
    columns, piece = dense.hidden.columns, block.neurons_per_piece
    while True:
        first = next_item(pool, counter) * piece
        if first >= columns:
            break
        find_neurons(block, dense, tokens, first, min(columns, first + piece), dense_scratch, own)


@device_function
def read_neurons(block, dense, tokens):
    """Read the bundles of the next active neurons, and let down sum these."""
    hidden, window, down = dense.hidden, block.window, block.down
    rows, bias = dense.gate, block.predictor_bias
    if block.predictor_second.address == 0:
        matrix = dense.gate_matrix
        if matrix.address == 0:
            matrix, rows = dense.up_matrix, hidden.floats
        bias = matrix.bias
    take_bundles(window, rows, hidden.float_stride, bias, tokens, hidden.columns)
    down.first_block = window.first // NEURONS_PER_BLOCK
    down.blocks = (window.last - window.first) // NEURONS_PER_BLOCK


@device_function
def down_phase(pool, thread, block, dense, tokens, own, by_outputs):
    """Phase: the sums over the active neurons of some blocks, in the thread's memory; or, if `by_outputs`,
    all sums of some outputs, in the memory of the first thread.
    """
    hidden = dense.hidden
    down = block.down
    sums = block.scratch if by_outputs != 0 else own
    call_pointer_10(
        down.kernel,
        down.address,
        thread,
        pool.threads,
        hidden.quantized,
        hidden.quantized_stride,
        tokens,
        sums + block.sums_offset,
        block.sums_stride,
        own + block.steps_offset,
        by_outputs,
    )


@device_function
def window_rounds(pool, thread, block, dense, tokens, dense_scratch, own, by_outputs):
    """Phases: the sums over the active neurons, whose bundles are read; in several rounds if the window is
    too small for all of them.
    """
    find_phase(pool, 4, block, dense, tokens, dense_scratch, own)
    window = block.window
    if thread == 0:
        window.last = 0
    while True:
        barrier_and_clear(pool, thread)
        if thread == 0:
            read_neurons(block, dense, tokens)
        barrier(pool, thread)
        neurons_phase(pool, 3, thread, block, dense, tokens, dense_scratch, own)
        barrier(pool, thread)
        down_phase(pool, thread, block, dense, tokens, own, by_outputs)
        if window.last >= dense.hidden.columns:
            return


@device_function
def add_sums(thread, threads, block, tokens):
    """Phase: add the sums of all threads for a part of the outputs, to those of the first. Return the first
    and the end of the part.
    """
    outputs = block.down.outputs
    each = -(-outputs // 16 // threads) * 16
    first = min(outputs, thread * each)
    last = min(outputs, first + each)
    sums = block.scratch
    sums += block.sums_offset
    for token in range(tokens):
        for i in range(first, last, 16):
            at = sums + token * block.sums_stride + 4 * i
            total = load_floats(at)
            for other in range(1, threads):
                total = add(total, load_floats(at + other * block.scratch_stride))
            store_floats(at, total)
    return first, last


@device_function
def finish_sums(pool, thread, block, step_args, by_outputs):
    """Phases: x += scale · norm(the sums of all threads + bias). Without a norm each thread adds a part."""
    dense, tokens, threads = block.dense, step_args.tokens, pool.threads
    down, post_norm, scale = dense.down_matrix, dense.post_norm, dense.residual_scale
    sums = block.scratch
    sums += block.sums_offset
    stride = block.sums_stride
    if by_outputs == 0:
        barrier(pool, thread)
        first, last = add_sums(thread, threads, block, tokens)
    else:
        outputs = block.down.outputs
        first, last = part_of_outputs(outputs, thread, threads), part_of_outputs(outputs, thread + 1, threads)
    if post_norm.kind == 0:
        last = min(last, post_norm.padded)
        for token in range(tokens):
            x = step_args.x + token * step_args.x_stride
            add_piece(x, sums + token * stride, down.bias, first, last, scale)
    barrier_and_clear(pool, thread)
    if post_norm.kind != 0:
        add_residual(pool, 5, thread, step_args, down, sums, stride, post_norm, scale)


@exports.add("sparse_feed_forward_block", SparseArgs, StepArgs, ThreadPoolArgs, int)
def sparse_feed_forward_block(block, step_args, pool, thread):
    """As `feed_forward_block`, for at most SPARSE_TOKENS tokens, with only the active neurons."""
    dense = block.dense
    tokens = step_args.tokens
    if tokens > SPARSE_TOKENS:
        feed_forward_block(dense, step_args, pool, thread)
        return
    own = block.scratch
    own += thread * block.scratch_stride
    dense_scratch = dense.scratch
    dense_scratch += thread * dense.scratch_stride
    normed = dense.normed
    prefetch_predictor(pool, thread, block, own)
    normalize_and_quantize(pool, 0, thread, step_args, dense.norm, normed)
    barrier(pool, thread)
    for token in range(tokens):
        source = normed.quantized + token * normed.quantized_stride
        lanes = own + SPARSE_SCRATCH + token * block.lanes_stride
        activations_by_lanes(source, normed.columns, lanes)
    predict_phase(pool, thread, block, step_args, own)
    gate_matrix = dense.gate_matrix
    predictor = block.predictor_second
    by_outputs = 1 if gate_matrix.address == 0 and predictor.address == 0 else 0
    if block.window.address != 0:
        window_rounds(pool, thread, block, dense, tokens, dense_scratch, own, by_outputs)
    else:
        neurons_phase(pool, 3, thread, block, dense, tokens, dense_scratch, own)
        barrier(pool, thread)
        if dense.sub_norm.address != 0:
            normalize_rows(pool, 6, thread, step_args, dense.sub_norm, dense.hidden)
            for token in range(thread, tokens, pool.threads):
                count_active(block, dense, token, 0, dense.hidden.columns)
            barrier(pool, thread)
        down_phase(pool, thread, block, dense, tokens, own, by_outputs)
    finish_sums(pool, thread, block, step_args, by_outputs)
