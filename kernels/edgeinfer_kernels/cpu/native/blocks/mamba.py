"""The Mamba-1 block."""

from edgeinfer_kernels.cpu.native.blocks.common.recurrent_rows import (
    convolve_lanes,
    keep_rows,
    load_matrix,
    row_address,
    state_count,
    step_of,
    store_matrix,
)
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    next_piece,
    normalize,
    normalize_and_quantize,
    project,
    project_residual,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier_prefetching, next_item
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential, sigmoid, softplus
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import MambaArgs

exports = Exports()


@device_function
def convolve(pool, counter, block, step_args):
    """Phase: u of this step's tokens, in the input formats of W_x, in pieces."""
    inputs = block.inputs
    tokens = step_args.tokens
    channels = block.channels
    while True:
        token, first, last = next_piece(pool, counter, channels)
        if token >= tokens:
            break
        row = inputs.floats + token * inputs.float_stride
        for i in range(first, last, 16):
            bias = load_floats(block.tap_bias + 4 * i)
            store_floats(row + 4 * i, convolve_lanes(block, step_args, token, 4 * i, bias))
        write_activations(row, inputs, token, tokens, first, last)


@device_function
def normalize_selected(pool, counter, block, step_args):
    """Phase: the norms of dt, B and C of each token, in place; dt also in the input format of W_dt."""
    tokens = step_args.tokens
    dt = block.dt
    columns = dt.columns
    while True:
        token = next_item(pool, counter)
        if token >= tokens:
            break
        row = dt.floats + token * dt.float_stride
        b = row_address(block.state, step_args, token) + block.b_at
        c = block.c + token * block.c_stride
        normalize(block.dt_norm, row, row)
        normalize(block.b_norm, b, b)
        normalize(block.c_norm, c, c)
        write_activations(row, dt, token, tokens, 0, columns)


@device_function
def update_channels(matrix, a, delta, u, b, size):
    """S ← e^(Δ A) S + Δ u Bᵀ of sixteen channels."""
    scaled = multiply(delta, u)
    for i in range(size):
        decay = exponential(multiply(delta, load_floats(a + 64 * i)))
        added = multiply(scaled, splat_f32(load_f32(b + 4 * i)))
        store_floats(matrix + 64 * i, multiply_add(decay, load_floats(matrix + 64 * i), added))


@device_function
def read_channels(matrix, c, size, value):
    """value + S C of sixteen channels."""
    for i in range(size):
        value = multiply_add(load_floats(matrix + 64 * i), splat_f32(load_f32(c + 4 * i)), value)
    return value


@device_function
def recur(pool, counter, block, step_args, matrix):
    """Phase: the recurrence, sixteen channels at a time, in `matrix`; (y + D u) · silu(z) of this step's
    tokens to the rows of `conv_out`. Δ replaces W_dt dt in the rows of the state.
    """
    state, inputs, conv_out = block.state, block.inputs, block.conv_out
    size = block.state_size
    groups = block.channels // 16
    states = state_count(step_args)
    tokens = step_args.tokens // states
    while True:
        item = next_item(pool, counter)
        if item >= groups * states:
            break
        own = step_of(step_args, item // groups)
        begin = own.first
        offset = 64 * (item % groups)
        matrix_at = state.matrix_at + offset * size
        load_matrix(state, own, matrix_at, matrix, size)
        a = block.a + offset * size
        tap_bias = load_floats(block.tap_bias + offset)
        dt_bias = load_floats(block.dt_bias + offset)
        skip = load_floats(block.skip + offset)
        for token in range(begin - own.pending, begin):
            row = row_address(state, own, token)
            u = convolve_lanes(block, step_args, token, offset, tap_bias)
            update_channels(matrix, a, load_floats(row + block.delta_at + offset), u, row + block.b_at, size)
        for token in range(begin, begin + tokens):
            row = row_address(state, own, token)
            at = row + block.delta_at + offset
            delta = softplus(load_floats(at), dt_bias)
            store_floats(at, delta)
            u = load_floats(inputs.floats + token * inputs.float_stride + offset)
            update_channels(matrix, a, delta, u, row + block.b_at, size)
            value = read_channels(matrix, block.c + token * block.c_stride, size, multiply(skip, u))
            gate = load_floats(block.z + token * block.z_stride + offset)
            value = multiply(value, multiply(gate, sigmoid(gate)))
            store_floats(conv_out.floats + token * conv_out.float_stride + offset, value)
        store_matrix(state, own, matrix_at, matrix, size)


@exports.add("mamba_block", MambaArgs, StepArgs, ThreadPoolArgs, int)
def mamba_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · ((S C + D u) · silu(W_z h))), with h = norm(x), for the tokens of
    `step_args`; the state S after them is written to the target slot.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    normed, inputs, dt, conv_out = block.normed, block.inputs, block.dt, block.conv_out
    x_matrix, dt_matrix, delta_matrix = block.x_matrix, block.dt_matrix, block.delta_matrix
    output, state = block.output_matrix, block.state
    rows, row_stride = state.rows, state.row_stride
    deltas, keys = rows + block.delta_at, rows + block.b_at
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, x_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, x_matrix, normed, rows, row_stride, scratch)
    project(pool, 2, thread, tokens, block.z_matrix, normed, block.z, block.z_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, dt_matrix)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    convolve(pool, 3, block, step_args)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 4, thread, tokens, dt_matrix, inputs, dt.floats, dt.float_stride, scratch)
    project(pool, 5, thread, tokens, block.b_matrix, inputs, keys, row_stride, scratch)
    project(pool, 6, thread, tokens, block.c_matrix, inputs, block.c, block.c_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, delta_matrix)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    normalize_selected(pool, 7, block, step_args)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 8, thread, tokens, delta_matrix, dt, deltas, row_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    recur(pool, 9, block, step_args, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    keep_rows(pool, 10, state, step_args)
    quantize_input(pool, 11, step_args, conv_out)
    barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 12, thread, step_args, block, block.output_matrix, block.conv_out, scratch)
