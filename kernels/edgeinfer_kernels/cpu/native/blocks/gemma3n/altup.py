"""AltUp: the streams of a token before the first layer, before and after each layer, and after the last."""

import math

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.layer_output import gate_inputs
from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    normalize,
    normalize_and_quantize,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_token,
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
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import hyperbolic_tangent, sum_of_products
from edgeinfer_kernels.cpu.runtime.gemma3n_args import AltUpCorrectArgs, AltUpProjectionArgs, StreamsArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

COEFS_AT = 64
"""Bytes before the coefficients in the scratch, after the results of the router."""

exports = Exports()


@device_function
def write_coefs(block, x, rows, scratch):
    """Write the coefficients of x to the scratch: the products of the first `rows` rows with the results of
    the router, tanh(W_router · norm(x) / d).
    """
    mean = sum_of_products(x, x, block.padded) / np.float32(block.width)
    scale = np.float32(1) / np.float32(math.sqrt(mean + block.epsilon))
    store_floats(scratch, splat_f32(np.float32(0)))
    for i in range(block.count):
        store_f32(
            scratch + 4 * i, sum_of_products(block.gains + i * block.row_bytes, x, block.padded) * scale
        )
    store_floats(scratch, hyperbolic_tangent(load_floats(scratch)))
    for i in range(rows):
        value = sum_of_products(block.coefs + 64 * i, scratch, 16)
        store_f32(scratch + COEFS_AT + 4 * i, value)


@device_function
def length_ratio(wanted, row, padded):
    """|wanted| / |row|."""
    squares = sum_of_products(wanted, wanted, padded) / sum_of_products(row, row, padded)
    return splat_f32(np.float32(math.sqrt(squares)))


@exports.add("altup_expand_block", AltUpProjectionArgs, StepArgs, ThreadPoolArgs, int)
def altup_expand_block(block, step_args, pool, thread):
    """S_j = A_j · x with the length of x, and S_0 = x, for the tokens of a step."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    all_streams, matrix = block.streams, block.matrix
    padded, stride = all_streams.padded, all_streams.stride
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
    ahead, end = first_weights(pool, thread, tokens, matrix)
    barrier_prefetching(pool, thread, ahead, end)
    out = all_streams.streams + block.at
    project(pool, 1, thread, tokens, matrix, block.normed, out, stride, scratch)
    barrier_and_clear(pool, thread)
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        first = all_streams.streams + token * stride
        row = out + token * stride
        ratio = length_ratio(x, row, padded)
        for i in range(0, padded, 16):
            store_floats(first + 4 * i, load_floats(x + 4 * i))
            store_floats(row + 4 * i, multiply(load_floats(row + 4 * i), ratio))
        token = next_token(pool, 2, tokens, token)


@exports.add("altup_predict_block", StreamsArgs, StepArgs, ThreadPoolArgs, int)
def altup_predict_block(block, step_args, pool, thread):
    """P_j = S_j + Σ C_ji · S_i and x ← P_0 for the tokens of a step."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    count, row_bytes = block.count, block.row_bytes
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        streams = block.streams + token * block.stride
        predictions = block.predictions + token * block.stride
        write_coefs(block, x, count * count, scratch)
        for i in range(0, block.padded, 16):
            for j in range(count):
                value = load_floats(streams + j * row_bytes + 4 * i)
                for k in range(count):
                    coef = splat_f32(load_f32(scratch + COEFS_AT + 4 * (j * count + k)))
                    value = multiply_add(coef, load_floats(streams + k * row_bytes + 4 * i), value)
                store_floats(predictions + j * row_bytes + 4 * i, value)
            store_floats(x + 4 * i, load_floats(predictions + 4 * i))
        token = next_token(pool, 0, tokens, token)


@device_function
def correct(pool, counter, thread, block, step_args):
    """Phase: S_j = P_j + c_j · (x - P_0), x ← S_0, and s ⊙ S_0 as input of the gate."""
    tokens = step_args.tokens
    each, normed, correct_scale = block.streams, block.output.normed, block.correct_scale
    scratch = each.scratch + thread * each.scratch_stride
    count, row_bytes = each.count, each.row_bytes
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        streams = each.streams + token * each.stride
        predictions = each.predictions + token * each.stride
        row = normed.floats + token * normed.float_stride
        write_coefs(each, x, count, scratch)
        for i in range(0, each.padded, 16):
            change = subtract(load_floats(x + 4 * i), load_floats(predictions + 4 * i))
            for j in range(count):
                coef = splat_f32(np.float32(1) + load_f32(scratch + COEFS_AT + 4 * j))
                value = multiply_add(coef, change, load_floats(predictions + j * row_bytes + 4 * i))
                store_floats(streams + j * row_bytes + 4 * i, value)
            first = load_floats(streams + 4 * i)
            store_floats(x + 4 * i, first)
            store_floats(row + 4 * i, multiply(first, load_floats(correct_scale + 4 * i)))
        write_activations(row, normed, token, tokens, 0, normed.columns)
        token = next_token(pool, counter, tokens, token)


@device_function
def add_outputs(pool, counter, thread, block, tokens):
    """Phase: S_j += norm(projected) for all but the first stream."""
    each, output = block.streams, block.output
    token = thread
    while token < tokens:
        row = output.projected + token * output.projected_stride
        streams = each.streams + token * each.stride
        normalize(output.post_norm, row, row)
        for i in range(0, each.padded, 16):
            value = load_floats(row + 4 * i)
            for j in range(1, each.count):
                at = streams + j * each.row_bytes + 4 * i
                store_floats(at, add(load_floats(at), value))
        token = next_token(pool, counter, tokens, token)


@exports.add("altup_correct_block", AltUpCorrectArgs, StepArgs, ThreadPoolArgs, int)
def altup_correct_block(block, step_args, pool, thread):
    """S_j = P_j + c_j · (x - P_0), x ← S_0, then S_1… += norm(W_proj · (activation(W_gate · (s ⊙ x)) ⊙
    input)), for the tokens of a step.
    """
    tokens = step_args.tokens
    output = block.output
    scratch = output.scratch + thread * output.scratch_stride
    gate, hidden, proj = output.inp_gate, output.hidden, output.proj
    correct(pool, 0, thread, block, step_args)
    ahead, end = first_weights(pool, thread, tokens, gate)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, gate, output.normed, hidden.floats, hidden.float_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, proj)
    ahead = barrier_prefetching(pool, thread, ahead, end)
    gate_inputs(pool, 2, output, tokens)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 3, thread, tokens, proj, hidden, output.projected, output.projected_stride, scratch)
    barrier_and_clear(pool, thread)
    add_outputs(pool, 4, thread, block, tokens)


@exports.add("altup_merge_block", AltUpProjectionArgs, StepArgs, ThreadPoolArgs, int)
def altup_merge_block(block, step_args, pool, thread):
    """x ← scale · (x + U_j · S_j with the length of S_0) for the tokens of a step."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    all_streams, matrix, normed = block.streams, block.matrix, block.normed
    padded, stride = all_streams.padded, all_streams.stride
    token = thread
    while token < tokens:
        row = normed.floats + token * normed.float_stride
        normalize(block.norm, all_streams.streams + block.at + token * stride, row)
        write_activations(row, normed, token, tokens, 0, normed.columns)
        token = next_token(pool, 0, tokens, token)
    ahead, end = first_weights(pool, thread, tokens, matrix)
    barrier_prefetching(pool, thread, ahead, end)
    project(pool, 1, thread, tokens, matrix, normed, block.projected, block.projected_stride, scratch)
    barrier_and_clear(pool, thread)
    scale = splat_f32(block.scale)
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        row = block.projected + token * block.projected_stride
        ratio = length_ratio(all_streams.streams + token * stride, row, padded)
        for i in range(0, padded, 16):
            value = multiply_add(load_floats(row + 4 * i), ratio, load_floats(x + 4 * i))
            store_floats(x + 4 * i, multiply(value, scale))
        token = next_token(pool, 2, tokens, token)
