"""The time mixing of RWKV-7."""

import math

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.common.recurrent_rows import (
    keep_rows,
    load_matrix,
    mix_piece,
    normalize_rows,
    row_address,
    state_count,
    step_of,
    store_matrix,
)
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    next_piece,
    project,
    project_residual,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier,
    barrier_and_clear,
    barrier_prefetching,
    next_item,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    lanes_sum,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
    subtract_product,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import (
    exponential,
    hyperbolic_tangent,
    layer_norm,
    sigmoid,
)
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS_PER_BLOCK
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import (
    Rwkv7TimeMixArgs,
)

exports = Exports()
DECAY = np.float32(-math.exp(-0.5))


@device_function
def mix(pool, counter, block, step_args):
    """Phase: the six interpolated inputs of every token, in pieces."""
    state = block.state
    lerp = block.lerp
    part = block.part_bytes
    columns = block.mixed_r.columns
    while True:
        token, first, last = next_piece(pool, counter, columns)
        if token >= step_args.tokens:
            break
        mix_piece(state, step_args, lerp, block.mixed_r, token, first, last)
        mix_piece(state, step_args, lerp + part, block.mixed_w, token, first, last)
        mix_piece(state, step_args, lerp + 2 * part, block.mixed_k, token, first, last)
        mix_piece(state, step_args, lerp + 3 * part, block.mixed_v, token, first, last)
        mix_piece(state, step_args, lerp + 4 * part, block.mixed_a, token, first, last)
        mix_piece(state, step_args, lerp + 5 * part, block.mixed_g, token, first, last)


@device_function
def activate_low(pool, counter, block, tokens):
    """Phase: tanh(W₁ x) and sigmoid(G₁ x) of every token; these, A₁ x and V₁ x in the input formats of the
    second matrices.
    """
    w, a, v, g = block.low_w, block.low_a, block.low_v, block.low_g
    while True:
        token = next_item(pool, counter)
        if token >= tokens:
            break
        row = w.floats + token * w.float_stride
        for i in range(0, w.columns, 16):
            store_floats(row + 4 * i, hyperbolic_tangent(load_floats(row + 4 * i)))
        write_activations(row, w, token, tokens, 0, w.columns)
        row = g.floats + token * g.float_stride
        for i in range(0, g.columns, 16):
            store_floats(row + 4 * i, sigmoid(load_floats(row + 4 * i)))
        write_activations(row, g, token, tokens, 0, g.columns)
        write_activations(a.floats + token * a.float_stride, a, token, tokens, 0, a.columns)
        if block.is_first == 0:
            write_activations(v.floats + token * v.float_stride, v, token, tokens, 0, v.columns)


@device_function
def prepare_head(block, step_args, token, head):
    """w, k, v, κ and κ·a of a head of a token in its row of the state, where the projections were; v of the
    first layer to `first_value`.
    """
    part = block.part_bytes
    first_offset = 4 * head * block.head_dim
    row = row_address(block.state, step_args, token)
    values = block.first_value + token * block.row_stride
    rates = block.value_rate + token * block.row_stride
    one = splat_f32(np.float32(1))
    squares = splat_f32(np.float32(0))
    for i in range(0, block.head_dim, 16):
        offset = first_offset + 4 * i
        at = row + offset
        decay = sigmoid(add(load_floats(block.w0 + offset), load_floats(at + part)))
        store_floats(at + part, exponential(multiply(splat_f32(DECAY), decay)))
        rate = sigmoid(add(load_floats(block.a0 + offset), load_floats(at + 5 * part)))
        store_floats(at + 5 * part, rate)
        v = load_floats(at + 3 * part)
        if block.is_first != 0:
            store_floats(values + offset, v)
        else:
            share = sigmoid(add(load_floats(block.v0 + offset), load_floats(rates + offset)))
            difference = subtract(load_floats(values + offset), v)
            store_floats(at + 3 * part, multiply_add(difference, share, v))
        k = load_floats(at + 2 * part)
        removed = multiply(k, load_floats(block.k_k + offset))
        store_floats(at + 4 * part, removed)
        squares = multiply_add(removed, removed, squares)
        change = multiply(load_floats(block.k_a + offset), subtract(rate, one))
        store_floats(at + 2 * part, multiply_add(k, change, k))
    length = np.float32(math.sqrt(lanes_sum(squares)))
    scale = splat_f32(np.float32(1) / max(length, np.float32(1e-12)))
    for i in range(0, block.head_dim, 16):
        at = row + first_offset + 4 * i
        removed = multiply(load_floats(at + 4 * part), scale)
        store_floats(at + 4 * part, removed)
        store_floats(at + 5 * part, multiply(removed, load_floats(at + 5 * part)))


@device_function
def prepare(pool, counter, block, step_args):
    """Phase: `prepare_head` of every head of every token."""
    heads = block.heads
    while True:
        item = next_item(pool, counter)
        token = item // heads
        if token >= step_args.tokens:
            break
        prepare_head(block, step_args, token, item % heads)


@device_function
def update_rows(matrix, row, part, v, head_dim):
    """S ← S diag(w) - (S κ) (κ a)ᵀ + v kᵀ of sixteen rows; `row`: the head's part of h."""
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, head_dim, 2):
        at = row + 4 * part + 4 * i
        even = multiply_add(load_floats(matrix + 64 * i), splat_f32(load_f32(at)), even)
        odd = multiply_add(load_floats(matrix + 64 * i + 64), splat_f32(load_f32(at + 4)), odd)
    known = add(even, odd)
    for i in range(head_dim):
        at = row + 4 * i
        decayed = multiply(load_floats(matrix + 64 * i), splat_f32(load_f32(at + part)))
        value = multiply_add(v, splat_f32(load_f32(at + 2 * part)), decayed)
        store_floats(matrix + 64 * i, subtract_product(known, splat_f32(load_f32(at + 5 * part)), value))


@device_function
def read_rows(matrix, r, head_dim):
    """S r of sixteen rows."""
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, head_dim, 2):
        even = multiply_add(load_floats(matrix + 64 * i), splat_f32(load_f32(r + 4 * i)), even)
        odd = multiply_add(load_floats(matrix + 64 * i + 64), splat_f32(load_f32(r + 4 * i + 4)), odd)
    return add(even, odd)


@device_function
def recur(pool, counter, block, step_args, matrix):
    """Phase: the recurrence, sixteen rows of a head's state at a time, in `matrix`; S r of this step's tokens
    to the rows of `conv_out`.
    """
    state, conv_out = block.state, block.conv_out
    head_dim = block.head_dim
    part = block.part_bytes
    groups = head_dim // 16
    states, items = state_count(step_args), block.heads * groups
    tokens = step_args.tokens // states
    while True:
        item = next_item(pool, counter)
        if item >= items * states:
            break
        own = step_of(step_args, item // items)
        item = item % items
        begin = own.first
        offset = 4 * (item // groups) * head_dim
        matrix_at = state.matrix_at + item * 64 * head_dim
        load_matrix(state, own, matrix_at, matrix, head_dim)
        for token in range(begin - own.pending, begin + tokens):
            row = row_address(state, own, token) + offset
            v = load_floats(row + 3 * part + 64 * (item % groups))
            update_rows(matrix, row, part, v, head_dim)
            if token >= begin:
                r = block.receptance + token * block.row_stride + offset
                out = conv_out.floats + token * conv_out.float_stride
                store_floats(out + 64 * item, read_rows(matrix, r, head_dim))
        store_matrix(state, own, matrix_at, matrix, head_dim)


@device_function
def finish_heads(pool, counter, block, step_args):
    """Phase: conv_out = (norm(S r) + v (r · r_k · k)) · g of every head; quantized if heads fill whole
    blocks.
    """
    head_dim = block.head_dim
    heads = block.heads
    part = block.part_bytes
    conv_out = block.conv_out
    tokens = step_args.tokens
    fills = head_dim % ACTIVATIONS_PER_BLOCK == 0
    while True:
        item = next_item(pool, counter)
        token = item // heads
        if token >= tokens:
            break
        first = item % heads * head_dim
        offset = 4 * first
        row = row_address(block.state, step_args, token) + offset
        r = block.receptance + token * block.row_stride + offset
        gate = block.gate + token * block.row_stride + offset
        line = conv_out.floats + token * conv_out.float_stride
        out = line + offset
        total = splat_f32(np.float32(0))
        for i in range(0, 4 * head_dim, 64):
            weighted = multiply(load_floats(r + i), load_floats(block.r_k + offset + i))
            total = multiply_add(weighted, load_floats(row + 2 * part + i), total)
        bonus = splat_f32(lanes_sum(total))
        weight, bias = block.head_weight + offset, block.head_bias + offset
        layer_norm(out, weight, bias, out, head_dim, head_dim, block.head_epsilon)
        for i in range(0, 4 * head_dim, 64):
            value = multiply_add(bonus, load_floats(row + 3 * part + i), load_floats(out + i))
            store_floats(out + i, multiply(value, load_floats(gate + i)))
        if fills:
            write_activations(line, conv_out, token, tokens, first, first + head_dim)


@device_function
def project_inputs(pool, thread, block, tokens, scratch):
    """Phase, with counters 2 to 8: the products of the six inputs."""
    state = block.state
    rows, row_stride, stride = state.rows, state.row_stride, block.row_stride
    part = block.part_bytes
    w, a, v, g = block.low_w, block.low_a, block.low_v, block.low_g
    keys, values = rows + 2 * part, rows + 3 * part
    mixed_v = block.mixed_v
    project(
        pool, 2, thread, tokens, block.receptance_matrix, block.mixed_r, block.receptance, stride, scratch
    )
    project(pool, 3, thread, tokens, block.key_matrix, block.mixed_k, keys, row_stride, scratch)
    project(pool, 4, thread, tokens, block.value_matrix, mixed_v, values, row_stride, scratch)
    project(pool, 5, thread, tokens, block.w1_matrix, block.mixed_w, w.floats, w.float_stride, scratch)
    project(pool, 6, thread, tokens, block.a1_matrix, block.mixed_a, a.floats, a.float_stride, scratch)
    project(pool, 7, thread, tokens, block.g1_matrix, block.mixed_g, g.floats, g.float_stride, scratch)
    if block.is_first == 0:
        project(pool, 8, thread, tokens, block.v1_matrix, mixed_v, v.floats, v.float_stride, scratch)


@device_function
def project_low(pool, thread, block, tokens, scratch):
    """Phase, with counters 0 to 3: the products with the second matrices of w, a, v and g."""
    state = block.state
    rows, row_stride, stride = state.rows, state.row_stride, block.row_stride
    part = block.part_bytes
    decays, rates = rows + part, rows + 5 * part
    project(pool, 0, thread, tokens, block.w2_matrix, block.low_w, decays, row_stride, scratch)
    project(pool, 1, thread, tokens, block.a2_matrix, block.low_a, rates, row_stride, scratch)
    project(pool, 2, thread, tokens, block.g2_matrix, block.low_g, block.gate, stride, scratch)
    if block.is_first == 0:
        project(pool, 3, thread, tokens, block.v2_matrix, block.low_v, block.value_rate, stride, scratch)


@exports.add("rwkv7_time_mix_block", Rwkv7TimeMixArgs, StepArgs, ThreadPoolArgs, int)
def rwkv7_time_mix_block(block, step_args, pool, thread):
    """x += scale · norm(W_out (o · g)), with the results o of the heads, for the tokens of `step_args`; the
    state after them is written to the target slot.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    state, output, conv_out = block.state, block.output_matrix, block.conv_out
    normalize_rows(pool, 0, thread, step_args, block.norm, state)
    ahead, end = first_weights(pool, thread, tokens, block.receptance_matrix)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    mix(pool, 1, block, step_args)
    barrier_prefetching(pool, thread, ahead, end)
    project_inputs(pool, thread, block, tokens, scratch)
    barrier(pool, thread)
    activate_low(pool, 9, block, tokens)
    barrier_and_clear(pool, thread)
    project_low(pool, thread, block, tokens, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    prepare(pool, 4, block, step_args)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    recur(pool, 5, block, step_args, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    keep_rows(pool, 6, state, step_args)
    finish_heads(pool, 7, block, step_args)
    barrier_prefetching(pool, thread, ahead, end)
    if block.head_dim % ACTIVATIONS_PER_BLOCK != 0:
        quantize_input(pool, 8, step_args, conv_out)
        barrier_prefetching(pool, thread, ahead, end)
    project_residual(pool, 9, thread, step_args, block, block.output_matrix, block.conv_out, scratch)
