"""The Mamba-2 block."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.common.recurrent_rows import (
    convolve_lanes,
    keep_rows,
    load_matrix,
    matrix_before,
    row_address,
    state_count,
    step_of,
    store_matrix,
)
from edgeinfer_kernels.cpu.native.blocks.phases import (
    COLUMNS_PER_PIECE,
    first_weights,
    normalize_and_quantize,
    project,
    project_residual,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_prefetching, next_item
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential, rms_norm, sigmoid, softplus
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS_PER_BLOCK
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import Mamba2Args

exports = Exports()


@device_function
def write_deltas(block, row):
    """Replace the projection of a token of this step by its Δ, in its row."""
    deltas = row + block.dt_at
    for i in range(0, block.heads, 16):
        bias = load_floats(block.dt_bias + 4 * i)
        store_floats(deltas + 4 * i, softplus(load_floats(deltas + 4 * i), bias))


@device_function
def convolve(pool, counter, block, step_args):
    """Phase: x, B and C of pending positions and of this step, to `conv_rows`, in pieces; and Δ."""
    channels = block.channels
    pieces = (channels + COLUMNS_PER_PIECE - 1) // COLUMNS_PER_PIECE
    pending = step_args.pending
    rows = pending + step_args.tokens
    while True:
        item = next_item(pool, counter)
        row = item // (pieces + 1)
        if row >= rows:
            break
        piece = item % (pieces + 1)
        if piece < pieces:
            first = piece * COLUMNS_PER_PIECE
            out = block.conv_rows + row * block.conv_stride
            last = min(channels, first + COLUMNS_PER_PIECE)
            for i in range(first, last, 16):
                bias = load_floats(block.tap_bias + 4 * i)
                store_floats(out + 4 * i, convolve_lanes(block, step_args, row - pending, 4 * i, bias))
        elif row >= pending:
            write_deltas(block, row_address(block.state, step_args, row - pending))


@device_function
def update_columns(columns, b, c, x, decay, state_size):
    """Sᵀ C after S ← decay · S + B xᵀ of sixteen columns of a head's state."""
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, state_size, 2):
        at = columns + 64 * i
        value = multiply_add(splat_f32(load_f32(b + 4 * i)), x, multiply(decay, load_floats(at)))
        store_floats(at, value)
        even = multiply_add(splat_f32(load_f32(c + 4 * i)), value, even)
        value = multiply_add(splat_f32(load_f32(b + 4 * i + 4)), x, multiply(decay, load_floats(at + 64)))
        store_floats(at + 64, value)
        odd = multiply_add(splat_f32(load_f32(c + 4 * i + 4)), value, odd)
    return add(even, odd)


@device_function
def recur(pool, counter, block, step_args, columns):
    """Phase: the recurrence, sixteen columns of a head's state at a time, in `columns`; y · silu(z) of the
    tokens of this step, to the rows of `conv_out`. The state before a tree is written before its tokens.
    """
    state = block.state
    state_size = block.state_size
    head_dim = block.head_dim
    parts = head_dim // 16
    column_bytes = 64 * state_size
    conv_out = block.conv_out
    inner = block.heads * head_dim
    states, items = state_count(step_args), block.heads * parts
    tokens = step_args.tokens // states
    while True:
        item = next_item(pool, counter)
        if item >= items * states:
            break
        own = step_of(step_args, item // items)
        item = item % items
        head = item // parts
        pending, begin = own.pending, own.first
        at = 64 * item
        offset = state.matrix_at + item * column_bytes
        load_matrix(state, own, offset, columns, state_size)
        b_at = 4 * (inner + head // (block.heads // block.groups) * state_size)
        c_at = b_at + 4 * block.groups * state_size
        rate = splat_f32(load_f32(block.a + 4 * head))
        skip = splat_f32(load_f32(block.d + 4 * head))
        for row in range(begin, begin + pending + tokens):
            if own.before != 0 and row == begin + pending:
                store_matrix(state, own, offset, columns, state_size)
            here = matrix_before(own, columns, row - pending, column_bytes)
            conv = block.conv_rows + row * block.conv_stride
            deltas = row_address(state, own, row - pending) + block.dt_at
            delta = splat_f32(load_f32(deltas + 4 * head))
            decay = exponential(multiply(delta, rate))
            x = load_floats(conv + at)
            y = update_columns(here, conv + b_at, conv + c_at, multiply(delta, x), decay, state_size)
            if row >= begin + pending:
                y = multiply_add(skip, x, y)
                gate = load_floats(block.z + (row - pending) * block.z_stride + at)
                out = conv_out.floats + (row - pending) * conv_out.float_stride
                store_floats(out + at, multiply(y, multiply(gate, sigmoid(gate))))
        if own.before == 0:
            store_matrix(state, own, offset, columns, state_size)


@device_function
def normalize_groups(pool, counter, block, step_args):
    """Phase: the norm of every group, quantized if groups fill whole blocks; without a norm quantization
    only.
    """
    conv_out = block.conv_out
    if block.group_norm == 0:
        quantize_input(pool, counter, step_args, conv_out)
        return
    tokens = step_args.tokens
    groups = block.groups
    width = block.heads * block.head_dim // groups
    fills = width % ACTIVATIONS_PER_BLOCK == 0
    while True:
        item = next_item(pool, counter)
        token = item // groups
        if token >= tokens:
            break
        first = item % groups * width
        row = conv_out.floats + token * conv_out.float_stride
        out = row + 4 * first
        rms_norm(out, block.group_norm + 4 * first, out, width, width, block.epsilon)
        if fills:
            write_activations(row, conv_out, token, tokens, first, first + width)


@exports.add("mamba2_block", Mamba2Args, StepArgs, ThreadPoolArgs, int)
def mamba2_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · norm(y · silu(z))), with z, xBC, dt = W_in · norm(x) and the results y of the
    heads, for the tokens of `step_args`; the state after them is written to the target slot.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    normed, conv_out, output = block.normed, block.conv_out, block.output_matrix
    state = block.state
    rows, row_stride = state.rows, state.row_stride
    xbc = block.xbc_matrix
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, xbc)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, xbc, normed, rows, row_stride, scratch)
    project(pool, 2, thread, tokens, block.z_matrix, normed, block.z, block.z_stride, scratch)
    project(pool, 3, thread, tokens, block.dt_matrix, normed, rows + block.dt_at, row_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    convolve(pool, 4, block, step_args)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    recur(pool, 5, block, step_args, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    keep_rows(pool, 6, state, step_args)
    normalize_groups(pool, 7, block, step_args)
    barrier_prefetching(pool, thread, ahead, end)
    width = block.heads * block.head_dim // block.groups
    if block.group_norm != 0 and width % ACTIVATIONS_PER_BLOCK != 0:
        quantize_input(pool, 8, step_args, conv_out)
        barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 9, thread, step_args, block, block.output_matrix, block.conv_out, scratch)
