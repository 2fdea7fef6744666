"""The results of a token's experts: weighted, added up and, with the shared expert's, added to x."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.phases import next_piece, normalize, project, quantize_input
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier, barrier_and_clear, next_item
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    lanes_max,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, load_i64
from edgeinfer_kernels.cpu.native.simd.vector_math import sigmoid, sum_of_products


@device_function
def add_expert_bias(value, matrix, expert, i):
    """Sixteen values of a projected row plus the bias of its expert."""
    bias = matrix.bias
    if bias != 0:
        value = add(value, load_floats(bias + expert * matrix.bias_stride + 4 * i))
    return value


@device_function
def shared_weight(block, token):
    """The weight of the shared expert for a token: 1, or the sigmoid of its router."""
    router = block.shared_router
    if router == 0:
        return np.float32(1)
    normed = block.normed
    row = normed.floats + token * normed.float_stride
    padded = block.norm.padded
    return lanes_max(sigmoid(splat_f32(sum_of_products(row, router, padded))))


@device_function
def weighted_sum(block, token, i):
    """Sixteen columns of Σ weight · (out + bias) of a token's experts here."""
    experts_per_token = block.experts_per_token
    row_indices = block.assignment_rows + 8 * experts_per_token * token
    ids = block.ids + token * block.ids_stride
    weights = block.weights + 4 * experts_per_token * token
    down = block.down_matrix
    is_weighted = block.weighted_input != 0
    total = splat_f32(np.float32(0))
    for slot in range(experts_per_token):
        row_index = load_i64(row_indices + 8 * slot)
        if row_index < 0:
            continue
        row = block.out + row_index * block.out_stride
        value = add_expert_bias(load_floats(row + 4 * i), down, load_i64(ids + 8 * slot), i)
        weight = np.float32(1) if is_weighted else load_f32(weights + 4 * slot)
        total = multiply_add(value, splat_f32(weight), total)
    return total


@device_function
def combine_columns(block, token, x, first, last):
    """x += scale · (the experts' sum + weight · shared) for columns first..last of a token. The sum is in a
    row if the experts read a latent projection. A partial sum replaces x.
    """
    scale = splat_f32(block.residual_scale)
    is_partial = block.is_partial != 0
    zero = splat_f32(np.float32(0))
    is_latent = block.latent_up.address != 0
    sums = block.sums + token * block.sums_stride
    shared = block.shared_up_matrix.address != 0
    shared_row = block.shared_out + token * block.shared_out_stride
    factor = splat_f32(np.float32(0))
    if shared:
        factor = splat_f32(shared_weight(block, token))
    for i in range(first, last, 16):
        total = load_floats(sums + 4 * i) if is_latent else weighted_sum(block, token, i)
        if shared:
            total = add(total, multiply(load_floats(shared_row + 4 * i), factor))
        base = zero if is_partial else load_floats(x + 4 * i)
        store_floats(x + 4 * i, multiply_add(total, scale, base))


@device_function
def sum_normed(block, token, row, shared):
    """row = norm(the experts' sum) + norm(shared) of a token."""
    padded = block.norm.padded
    for i in range(0, padded, 16):
        store_floats(row + 4 * i, weighted_sum(block, token, i))
    normalize(block.expert_norm, row, row)
    normalize(block.shared_norm, shared, shared)
    for i in range(0, padded, 16):
        store_floats(row + 4 * i, add(load_floats(row + 4 * i), load_floats(shared + 4 * i)))


@device_function
def sum_plain(block, token, row, shared):
    """row = the experts' sum + weight · shared of a token."""
    is_latent = block.latent_up.address != 0
    has_shared = block.shared_up_matrix.address != 0
    factor = splat_f32(np.float32(0))
    if has_shared:
        factor = splat_f32(shared_weight(block, token))
    for i in range(0, block.norm.padded, 16):
        total = load_floats(row + 4 * i) if is_latent else weighted_sum(block, token, i)
        if has_shared:
            total = add(total, multiply(load_floats(shared + 4 * i), factor))
        store_floats(row + 4 * i, total)


@device_function
def combine_normed(pool, counter, block, step_args):
    """Phase: x += scale · norm(the experts' sum + shared), token by token. Those of a dense feed-forward
    besides experts have norms before they are added.
    """
    scale = splat_f32(block.residual_scale)
    padded = block.norm.padded
    with_dense = block.shared_gain != 0
    while True:
        token = next_item(pool, counter)
        if token >= step_args.tokens:
            break
        row = block.sums + token * block.sums_stride
        shared = block.shared_out + token * block.shared_out_stride
        if with_dense:
            sum_normed(block, token, row, shared)
        else:
            sum_plain(block, token, row, shared)
        normalize(block.post_norm, row, row)
        x = step_args.x + token * step_args.x_stride
        for i in range(0, padded, 16):
            store_floats(x + 4 * i, multiply_add(load_floats(row + 4 * i), scale, load_floats(x + 4 * i)))


@device_function
def combine(pool, counter, block, step_args):
    """Phase: add the experts' results to the residual, in pieces of columns."""
    padded = block.norm.padded
    while True:
        token, first, last = next_piece(pool, counter, padded)
        if token >= step_args.tokens:
            break
        x = step_args.x + token * step_args.x_stride
        combine_columns(block, token, x, first, last)


@device_function
def sum_latent(pool, counter, block, tokens):
    """Phase: the experts' sum of each token, in the latent projection, in pieces of columns."""
    target = block.latent_sum
    while True:
        token, first, last = next_piece(pool, counter, target.columns)
        if token >= tokens:
            break
        row = target.floats + token * target.float_stride
        for i in range(first, last, 16):
            store_floats(row + 4 * i, weighted_sum(block, token, i))


@device_function
def project_latent_back(pool, thread, block, step_args, scratch):
    """Counters 13 and, cleared, 0 and 1: the experts' sums from the latent projection to `sums`."""
    tokens = step_args.tokens
    latent = block.latent_sum
    sum_latent(pool, 13, block, tokens)
    barrier_and_clear(pool, thread)
    quantize_input(pool, 0, step_args, latent)
    barrier(pool, thread)
    project(pool, 1, thread, tokens, block.latent_up, latent, block.sums, block.sums_stride, scratch)
    barrier_and_clear(pool, thread)
