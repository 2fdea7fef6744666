"""The feed-forward block of ReLU models for a few tokens: inactive neurons cost only their detection.

Gate is computed first (up, without a gate), for all neurons or only for those that a predictor selects. Then
up is computed for the active ones, and then their share of down. The first three steps are one phase: a
thread processes a piece of the neurons completely, so no thread waits for a list.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.feed_forward import activate_piece, feed_forward_block
from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_residual,
    multiply_rows,
    normalize_and_quantize,
    operands,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier, barrier_between, next_item
from edgeinfer_kernels.cpu.native.gemv.quantize import quantize_blocks
from edgeinfer_kernels.cpu.native.simd.exports import Exports, inner
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    positive_lanes,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import (
    call_pointer_6,
    call_pointer_10,
    load_f32,
    load_i64,
    store_i32,
    trailing_zeros,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_rows import activations_by_lanes
from edgeinfer_kernels.cpu.runtime.abi import (
    CALL,
    FEED_FORWARD,
    INPUT,
    LIST_BYTES,
    MATRIX,
    NEURON_COLUMNS,
    NEURON_ROWS,
    ROWS_AHEAD,
    SPARSE_FEED_FORWARD,
    SPARSE_SCRATCH,
    SPARSE_TOKENS,
)

AT_REST = -1e30
"""The projection of a neuron that is not computed: ReLU maps it to 0 for any bias."""

exports = Exports()


@inner
def list_positive(row, bias, first, last, neurons):
    """List the neurons first…last whose projection plus bias is above 0, as int32; return their number."""
    count = 0
    for i in range(first, last, 16):
        value = load_floats(row + 4 * i)
        if bias != 0:
            value = add(value, load_floats(bias + 4 * i))
        bits = positive_lanes(value)
        while bits != 0:
            store_i32(neurons + 4 * count, i + trailing_zeros(bits))
            bits &= bits - 1
            count += 1
    for ahead in range(ROWS_AHEAD):
        store_i32(neurons + 4 * (count + ahead), first)
    return count


@inner
def fill_row(row, first, last, value):
    for i in range(first, last, 16):
        store_floats(row + 4 * i, splat_f32(np.float32(value)))


@inner
def times_some(rows, neurons, count, lanes, out):
    """out[n] = row n · x for the listed neurons; `rows` is a NEURON_ROWS."""
    call_pointer_6(
        load_i64(rows + NEURON_ROWS.kernel),
        load_i64(rows + NEURON_ROWS.weights),
        load_i64(rows + NEURON_ROWS.groups),
        neurons,
        count,
        lanes,
        out,
    )


@inner
def find_neurons(block, dense, tokens, first, last, dense_scratch, own):
    """Compute gate (or up) of a piece of the neurons: all of them, or those that the predictor selects."""
    hidden = load_i64(dense + FEED_FORWARD.hidden)
    source, matrix = load_i64(dense + FEED_FORWARD.normed), load_i64(dense + FEED_FORWARD.gate_matrix)
    out = load_i64(dense + FEED_FORWARD.gate)
    second = load_i64(block + SPARSE_FEED_FORWARD.predictor_second)
    if second != 0:
        source, matrix = load_i64(block + SPARSE_FEED_FORWARD.predicted), second
    elif matrix == 0:
        matrix, out = load_i64(dense + FEED_FORWARD.up_matrix), load_i64(hidden + INPUT.floats)
    activations, times = operands(matrix, source)
    stride = load_i64(hidden + INPUT.float_stride)
    kernel = load_i64(matrix + MATRIX.kernel)
    multiply_rows(kernel, matrix, first, last, activations, times, tokens, out, stride, dense_scratch)


@inner
def compute_active(block, dense, token, first, last, own):
    """Compute a token's gate and up of the neurons first…last; 0 or AT_REST for inactive ones."""
    hidden = load_i64(dense + FEED_FORWARD.hidden)
    stride = load_i64(hidden + INPUT.float_stride)
    gate = load_i64(dense + FEED_FORWARD.gate) + token * stride
    up = load_i64(hidden + INPUT.floats) + token * stride
    gate_matrix = load_i64(dense + FEED_FORWARD.gate_matrix)
    lanes = own + SPARSE_SCRATCH + token * load_i64(block + SPARSE_FEED_FORWARD.lanes_stride)
    up_rows = load_i64(block + SPARSE_FEED_FORWARD.up_rows)
    if load_i64(block + SPARSE_FEED_FORWARD.predictor_second) != 0:
        count = list_positive(gate, load_i64(block + SPARSE_FEED_FORWARD.predictor_bias), first, last, own)
        if gate_matrix == 0:
            fill_row(up, first, last, AT_REST)
            times_some(up_rows, own, count, lanes, up)
        else:
            fill_row(gate, first, last, AT_REST)
            times_some(load_i64(block + SPARSE_FEED_FORWARD.gate_rows), own, count, lanes, gate)
    if gate_matrix != 0:
        count = list_positive(gate, load_i64(gate_matrix + MATRIX.bias), first, last, own)
        fill_row(up, first, last, 0)
        times_some(up_rows, own, count, lanes, up)


@inner
def activate_neurons(dense, token, tokens, first, last):
    """hidden = activation(gate)·up, or activation(up), of the neurons first…last, in the input format of
    down.
    """
    hidden = load_i64(dense + FEED_FORWARD.hidden)
    stride = load_i64(hidden + INPUT.float_stride)
    gate = load_i64(dense + FEED_FORWARD.gate) + token * stride
    up = load_i64(hidden + INPUT.floats) + token * stride
    gate_matrix = load_i64(dense + FEED_FORWARD.gate_matrix)
    up_matrix = load_i64(dense + FEED_FORWARD.up_matrix)
    code = load_i64(dense + FEED_FORWARD.activation)
    activate_piece(code, gate_matrix, up_matrix, gate, up, hidden, token, tokens, first, last)


@inner
def neurons_phase(team, counter, block, dense, tokens, dense_scratch, own):
    """Phase: from the normed x to the hidden activations, in pieces of the neurons."""
    columns = load_i64(load_i64(dense + FEED_FORWARD.hidden) + INPUT.columns)
    piece = load_i64(block + SPARSE_FEED_FORWARD.neurons_a_piece)
    while True:
        first = next_item(team, counter) * piece
        if first >= columns:
            break
        last = min(columns, first + piece)
        find_neurons(block, dense, tokens, first, last, dense_scratch, own)
        for token in range(tokens):
            compute_active(block, dense, token, first, last, own)
            activate_neurons(dense, token, tokens, first, last)


@inner
def down_phase(team, counter, block, dense, tokens, own):
    """Phase: the active neurons' share of down, in pieces of the outputs."""
    hidden = load_i64(dense + FEED_FORWARD.hidden)
    down = load_i64(block + SPARSE_FEED_FORWARD.down)
    outputs = load_i64(down + NEURON_COLUMNS.outputs)
    piece = load_i64(block + SPARSE_FEED_FORWARD.outputs_a_piece)
    while True:
        first = next_item(team, counter) * piece
        if first >= outputs:
            break
        call_pointer_10(
            load_i64(down + NEURON_COLUMNS.kernel),
            down,
            first,
            min(outputs, first + piece),
            load_i64(hidden + INPUT.quantized),
            load_i64(hidden + INPUT.quantized_stride),
            tokens,
            load_i64(block + SPARSE_FEED_FORWARD.sums),
            load_i64(block + SPARSE_FEED_FORWARD.sums_stride),
            own + LIST_BYTES,
            0,
        )


@inner
def predict_phase(team, counter, thread, block, dense, tokens, dense_scratch):
    """Phase: multiply x with the predictor's low-rank matrix, if there is a predictor."""
    first = load_i64(block + SPARSE_FEED_FORWARD.predictor_first)
    if first == 0:
        return
    predicted = load_i64(block + SPARSE_FEED_FORWARD.predicted)
    out, stride = load_i64(predicted + INPUT.floats), load_i64(predicted + INPUT.float_stride)
    normed = load_i64(dense + FEED_FORWARD.normed)
    project(team, counter, thread, tokens, first, normed, out, stride, dense_scratch)
    barrier(team)
    if next_item(team, counter + 1) == 0:
        for token in range(tokens):
            to = load_i64(predicted + INPUT.quantized) + token * load_i64(predicted + INPUT.quantized_stride)
            quantize_blocks(out + token * stride, to, 0, load_i64(predicted + INPUT.columns))
    barrier(team)


@exports.add("sparse_feed_forward_block", 4)
def sparse_feed_forward_block(block, call, team, thread):
    """As `feed_forward_block`, for at most SPARSE_TOKENS tokens, with only the active neurons."""
    dense = load_i64(block + SPARSE_FEED_FORWARD.dense)
    tokens = load_i64(call + CALL.tokens)
    if tokens > SPARSE_TOKENS:
        feed_forward_block(dense, call, team, thread)
        return
    own = load_i64(block + SPARSE_FEED_FORWARD.scratch)
    own += thread * load_i64(block + SPARSE_FEED_FORWARD.scratch_stride)
    dense_scratch = load_i64(dense + FEED_FORWARD.scratch)
    dense_scratch += thread * load_i64(dense + FEED_FORWARD.scratch_stride)
    normed = load_i64(dense + FEED_FORWARD.normed)
    normalize_and_quantize(team, 0, thread, call, load_i64(dense + FEED_FORWARD.norm), normed)
    barrier(team)
    for token in range(tokens):
        source = load_i64(normed + INPUT.quantized) + token * load_i64(normed + INPUT.quantized_stride)
        lanes = own + SPARSE_SCRATCH + token * load_i64(block + SPARSE_FEED_FORWARD.lanes_stride)
        activations_by_lanes(source, load_i64(normed + INPUT.columns), lanes)
    predict_phase(team, 1, thread, block, dense, tokens, dense_scratch)
    neurons_phase(team, 3, block, dense, tokens, dense_scratch, own)
    barrier(team)
    down_phase(team, 4, block, dense, tokens, own)
    barrier_between(team)
    down = load_i64(dense + FEED_FORWARD.down_matrix)
    sums = load_i64(block + SPARSE_FEED_FORWARD.sums)
    stride = load_i64(block + SPARSE_FEED_FORWARD.sums_stride)
    scale = load_f32(dense + FEED_FORWARD.residual_scale)
    post_norm = load_i64(dense + FEED_FORWARD.post_norm)
    add_residual(team, 5, thread, call, down, sums, stride, post_norm, scale)
