"""The gated delta net block and the Kimi Delta Attention block."""

import math

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
    first_weights,
    normalize_and_quantize,
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
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import (
    exponential,
    rms_norm,
    sigmoid,
    softplus,
    sum_of_products,
)
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS_PER_BLOCK
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import GatedDeltaNetArgs, KimiDeltaAttentionArgs

exports = Exports()


@device_function
def convolve_head(block, step_args, token, head, out):
    """silu of the convolution of one head of q, k or v, to `out`; heads of q and k get the length 1, q also
    the factor 1 / √head_dim.
    """
    head_dim = block.head_dim
    first = head * head_dim
    zero = splat_f32(np.float32(0))
    for i in range(0, head_dim, 16):
        store_floats(out + 4 * i, convolve_lanes(block, step_args, token, 4 * (first + i), zero))
    key_heads = block.key_heads
    if head < 2 * key_heads:
        square = sum_of_products(out, out, head_dim) + np.float32(block.epsilon)
        if head < key_heads:
            square *= np.float32(head_dim)
        scale = splat_f32(np.float32(1) / np.float32(math.sqrt(square)))
        for i in range(0, head_dim, 16):
            store_floats(out + 4 * i, multiply(load_floats(out + 4 * i), scale))


@device_function
def write_gates(block, row, part):
    """A part of g of a token of this step, with part 0 also β, in its row: they overwrite projections."""
    betas = row + block.gates_at
    if part == 0:
        for i in range(0, block.gate_bytes, 64):
            store_floats(betas + i, sigmoid(load_floats(betas + i)))
    alphas = betas + block.gate_bytes
    for i in range(part * block.part_bytes, (part + 1) * block.part_bytes, 64):
        alpha = load_floats(alphas + i)
        dt = load_floats(block.dt + i)
        rate = load_floats(block.a + i)
        store_floats(alphas + i, multiply(rate, softplus(alpha, dt)))


@device_function
def write_decays(block, row, part, out):
    """e^g of a part of g, from the row of a position to `out`."""
    decays = row + block.gates_at + block.gate_bytes
    for i in range(part * block.part_bytes, (part + 1) * block.part_bytes, 64):
        store_floats(out + i, exponential(load_floats(decays + i)))


@device_function
def convolve(pool, counter, block, step_args):
    """Phase: the heads of q, k and v of pending positions and of this step, to `conv_rows`; the gates, and
    the decays of key elements.
    """
    heads = 2 * block.key_heads + block.value_heads
    items = heads + block.gate_parts
    pending = step_args.pending
    rows = pending + step_args.tokens
    head_bytes = 4 * block.head_dim
    while True:
        item = next_item(pool, counter)
        row = item // items
        if row >= rows:
            break
        head = item % items
        out = block.conv_rows + row * block.conv_stride
        if head < heads:
            convolve_head(block, step_args, row - pending, head, out + head * head_bytes)
        else:
            gates = row_address(block.state, step_args, row - pending)
            if row >= pending:
                write_gates(block, gates, head - heads)
            if block.decays_at != 0:
                write_decays(block, gates, head - heads, out + block.decays_at)


@device_function
def key_head_of(block, head):
    """The key head of a value head."""
    if block.repeats_each != 0:
        return head // (block.value_heads // block.key_heads)
    return head % block.key_heads


@device_function
def update_columns(columns, q, k, v, beta, decay, head_dim):
    """Sᵀ q after the update of sixteen columns of a head's state."""
    predicted = splat_f32(np.float32(0))
    other = splat_f32(np.float32(0))
    for i in range(0, head_dim, 2):
        first = splat_f32(load_f32(k + 4 * i))
        second = splat_f32(load_f32(k + 4 * i + 4))
        predicted = multiply_add(first, load_floats(columns + 64 * i), predicted)
        other = multiply_add(second, load_floats(columns + 64 * i + 64), other)
    predicted = multiply_add(splat_f32(np.float32(1)), predicted, other)
    delta = multiply(beta, subtract(v, multiply(decay, predicted)))
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, head_dim, 2):
        at = columns + 64 * i
        value = multiply_add(splat_f32(load_f32(k + 4 * i)), delta, multiply(decay, load_floats(at)))
        store_floats(at, value)
        even = multiply_add(splat_f32(load_f32(q + 4 * i)), value, even)
        value = multiply_add(splat_f32(load_f32(k + 4 * i + 4)), delta, multiply(decay, load_floats(at + 64)))
        store_floats(at + 64, value)
        odd = multiply_add(splat_f32(load_f32(q + 4 * i + 4)), value, odd)
    return multiply_add(splat_f32(np.float32(1)), even, odd)


@device_function
def update_decayed_columns(columns, q, k, v, beta, decays, head_dim):
    """As `update_columns`, with a decay of each key element."""
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, head_dim, 2):
        first = splat_f32(load_f32(k + 4 * i) * load_f32(decays + 4 * i))
        second = splat_f32(load_f32(k + 4 * i + 4) * load_f32(decays + 4 * i + 4))
        even = multiply_add(first, load_floats(columns + 64 * i), even)
        odd = multiply_add(second, load_floats(columns + 64 * i + 64), odd)
    delta = multiply(beta, subtract(v, add(even, odd)))
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, head_dim, 2):
        at = columns + 64 * i
        decayed = multiply(splat_f32(load_f32(decays + 4 * i)), load_floats(at))
        value = multiply_add(splat_f32(load_f32(k + 4 * i)), delta, decayed)
        store_floats(at, value)
        even = multiply_add(splat_f32(load_f32(q + 4 * i)), value, even)
        decayed = multiply(splat_f32(load_f32(decays + 4 * i + 4)), load_floats(at + 64))
        value = multiply_add(splat_f32(load_f32(k + 4 * i + 4)), delta, decayed)
        store_floats(at + 64, value)
        odd = multiply_add(splat_f32(load_f32(q + 4 * i + 4)), value, odd)
    return add(even, odd)


@device_function
def recur(pool, counter, block, step_args, columns):
    """Phase: the recurrence, sixteen columns of a head's state at a time, in `columns`; results of this
    step's tokens to the rows of `conv_out`. The state before a tree is written before its tokens.
    """
    state = block.state
    head_dim = block.head_dim
    groups = head_dim // 16
    column_bytes = 64 * head_dim
    conv_out = block.conv_out
    values_at = 8 * block.key_heads * head_dim
    states, items = state_count(step_args), block.value_heads * groups
    tokens = step_args.tokens // states
    while True:
        item = next_item(pool, counter)
        if item >= items * states:
            break
        own = step_of(step_args, item // items)
        item = item % items
        head = item // groups
        group = item % groups
        pending, begin = own.pending, own.first
        offset = state.matrix_at + item * column_bytes
        load_matrix(state, own, offset, columns, head_dim)
        key = 4 * head_dim * key_head_of(block, head)
        value_at = values_at + 4 * (head * head_dim + 16 * group)
        for row in range(begin, begin + pending + tokens):
            if own.before != 0 and row == begin + pending:
                store_matrix(state, own, offset, columns, head_dim)
            here = matrix_before(own, columns, row - pending, column_bytes)
            conv = block.conv_rows + row * block.conv_stride
            gates = row_address(state, own, row - pending) + block.gates_at + 4 * head
            beta = splat_f32(load_f32(gates))
            q = conv + key
            k = q + 4 * head_dim * block.key_heads
            v = load_floats(conv + value_at)
            if block.decays_at != 0:
                decays = conv + block.decays_at + 4 * head * head_dim
                result = update_decayed_columns(here, q, k, v, beta, decays, head_dim)
            else:
                decay = exponential(splat_f32(load_f32(gates + block.gate_bytes)))
                result = update_columns(here, q, k, v, beta, decay, head_dim)
            if row >= begin + pending:
                out = conv_out.floats + (row - pending) * conv_out.float_stride
                store_floats(out + 4 * (head * head_dim + 16 * group), result)
        if own.before == 0:
            store_matrix(state, own, offset, columns, head_dim)


@device_function
def gate_heads(pool, counter, block, tokens):
    """Phase: conv_out = norm(o) · silu(z) of every head, or norm(o) · sigmoid(z); quantized if heads fill
    whole blocks.
    """
    head_dim = block.head_dim
    heads = block.value_heads
    conv_out = block.conv_out
    weight = block.head_norm.weight
    fills = head_dim % ACTIVATIONS_PER_BLOCK == 0
    while True:
        item = next_item(pool, counter)
        token = item // heads
        if token >= tokens:
            break
        first = item % heads * head_dim
        row = conv_out.floats + token * conv_out.float_stride
        z = block.z + token * block.z_stride + 4 * first
        out = row + 4 * first
        rms_norm(out, weight, out, head_dim, head_dim, block.head_norm.epsilon)
        for i in range(0, head_dim, 16):
            value = load_floats(z + 4 * i)
            gate = sigmoid(value)
            if block.silu_gate != 0:
                gate = multiply(value, gate)
            store_floats(out + 4 * i, multiply(load_floats(out + 4 * i), gate))
        if fills:
            write_activations(row, conv_out, token, tokens, first, first + head_dim)


@device_function
def recur_and_project(pool, counter, thread, step_args, block, scratch):
    """Phases: the convolution, the recurrence, the gated norm of its results, and the last projection; the
    state after the step is written. Their counters are `counter` and the next six.
    """
    tokens, heads = step_args.tokens, block.heads
    ahead, end = first_weights(pool, thread, tokens, block.output_matrix)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    convolve(pool, counter, heads, step_args)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    recur(pool, counter + 1, heads, step_args, scratch)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    keep_rows(pool, counter + 2, heads.state, step_args)
    gate_heads(pool, counter + 3, heads, tokens)
    barrier_prefetching(pool, thread, ahead, end)
    if heads.head_dim % ACTIVATIONS_PER_BLOCK != 0:
        quantize_input(pool, counter + 4, step_args, block.conv_out)
        barrier_prefetching(pool, thread, ahead, end)
    project_residual(
        pool, counter + 5, thread, step_args, block, block.output_matrix, block.conv_out, scratch
    )


@exports.add("gated_delta_net_block", GatedDeltaNetArgs, StepArgs, ThreadPoolArgs, int)
def gated_delta_net_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · (norm(o) · silu(W_z h))), with h = norm(x) and the results o of the value
    heads, for the tokens of `step_args`; the state after them is written to the target slot.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    normed, heads, qkv = block.normed, block.heads, block.qkv_matrix
    state = heads.state
    rows, row_stride = state.rows, state.row_stride
    gates = rows + heads.gates_at
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, normed)
    ahead, end = first_weights(pool, thread, tokens, qkv)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, qkv, normed, rows, row_stride, scratch)
    project(pool, 2, thread, tokens, block.z_matrix, normed, heads.z, heads.z_stride, scratch)
    project(pool, 3, thread, tokens, block.beta_matrix, normed, gates, row_stride, scratch)
    project(
        pool, 4, thread, tokens, block.alpha_matrix, normed, gates + heads.gate_bytes, row_stride, scratch
    )
    recur_and_project(pool, 5, thread, step_args, block, scratch)


@device_function
def project_inputs(pool, thread, block, tokens, scratch):
    """Phase, with counters 1 to 6: the products of h. q, k, v and β are written to the rows of the state."""
    normed, heads, f, g = block.normed, block.heads, block.low_f, block.low_g
    state = heads.state
    rows, stride = state.rows, state.row_stride
    part = 4 * heads.value_heads * heads.head_dim
    gates = rows + heads.gates_at
    project(pool, 1, thread, tokens, block.q_matrix, normed, rows, stride, scratch)
    project(pool, 2, thread, tokens, block.k_matrix, normed, rows + part, stride, scratch)
    project(pool, 3, thread, tokens, block.v_matrix, normed, rows + 2 * part, stride, scratch)
    project(pool, 4, thread, tokens, block.f1_matrix, normed, f.floats, f.float_stride, scratch)
    project(pool, 5, thread, tokens, block.g1_matrix, normed, g.floats, g.float_stride, scratch)
    project(pool, 6, thread, tokens, block.beta_matrix, normed, gates, stride, scratch)


@exports.add("kimi_delta_attention_block", KimiDeltaAttentionArgs, StepArgs, ThreadPoolArgs, int)
def kimi_delta_attention_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · (norm(o) · sigmoid(G₂ G₁ h))), with h = norm(x) and the results o of the
    heads, for the tokens of `step_args`; the state after them is written to the target slot.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    heads = block.heads
    state = heads.state
    decays = state.rows + heads.gates_at + heads.gate_bytes
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
    ahead, end = first_weights(pool, thread, tokens, block.q_matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project_inputs(pool, thread, block, tokens, scratch)
    barrier(pool, thread)
    quantize_input(pool, 7, step_args, block.low_f)
    quantize_input(pool, 8, step_args, block.low_g)
    barrier_and_clear(pool, thread)
    project(pool, 0, thread, tokens, block.f2_matrix, block.low_f, decays, state.row_stride, scratch)
    project(pool, 1, thread, tokens, block.g2_matrix, block.low_g, heads.z, heads.z_stride, scratch)
    recur_and_project(pool, 2, thread, step_args, block, scratch)
