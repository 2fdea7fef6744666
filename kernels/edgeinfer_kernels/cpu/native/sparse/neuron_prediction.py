"""The predictor of a sparse feed-forward: two products of low rank, which select neurons."""

import math

import numpy as np

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier
from edgeinfer_kernels.cpu.native.gemv.quantize import quantize_blocks
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    at_least,
    load_floats,
    multiply,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import prefetch
from edgeinfer_kernels.cpu.native.simd.vector_math import sum_of_products
from edgeinfer_kernels.cpu.native.sparse.neuron_lists import (
    list_every,
    multiply_listed_rows,
    prefetch_first_rows,
)
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, SPARSE_SCRATCH


@device_function
def piece_of(item, block, dense):
    """(first, last) of a piece of the neurons; first == last: there is none."""
    begin, end = 0, dense.hidden.columns
    if block.window.address != 0:
        begin, end = block.window.first, block.window.last
    piece = block.neurons_per_piece
    first = min(end, begin + item * piece)
    return first, min(end, first + piece)


@device_function
def prefetch_biases(block, dense, first, last):
    """Prefetch what the lists of a piece compare with."""
    gate_matrix, bias = dense.gate_matrix, block.predictor_bias
    for line in range(4 * first, 4 * last, CACHE_LINE):
        if bias != 0:
            prefetch(bias + line)
        if gate_matrix.address != 0 and gate_matrix.bias != 0:
            prefetch(gate_matrix.bias + line)


@device_function
def rectify(row, rank, x, norm):
    """row = relu(row)·r, where r is the root mean square of x, which the norm divides by."""
    mean = sum_of_products(x, x, norm.padded) / np.float32(norm.width)
    factor = splat_f32(np.float32(math.sqrt(mean + norm.epsilon)))
    for i in range(0, rank, 16):
        value = at_least(load_floats(row + 4 * i), np.float32(0))
        store_floats(row + 4 * i, multiply(value, factor))


@device_function
def prefetch_predictor(pool, thread, block, own):
    """Prefetch what a thread reads of the predictor until its first list, while the norm is computed."""
    rows, second, dense = block.predictor_rows, block.predictor_second, block.dense
    if rows.address == 0:
        return
    count = list_every(thread, block.rank, pool.threads, own)
    prefetch_first_rows(rows, rows.weights, own, count, 0)
    first, last = piece_of(thread, block, dense)
    at = second.weights + first // ROWS_PER_GROUP * second.group_bytes
    for line in range(0, (last - first) // ROWS_PER_GROUP * second.group_bytes, CACHE_LINE):
        prefetch(at + line)
    prefetch_biases(block, dense, first, last)


@device_function
def predict_phase(pool, thread, block, step_args, own):
    """Phase: multiply x with the predictor's low-rank matrix, if there is a predictor; each thread some rows.
    Then each thread quantizes the result for itself.
    """
    tokens, norm = step_args.tokens, block.dense.norm
    rows = block.predictor_rows
    if rows.address == 0:
        return
    threads, rank = pool.threads, block.rank
    first = thread
    while first < rank:
        count = list_every(first, rank, threads, own)
        for token in range(tokens):
            lanes = own + SPARSE_SCRATCH + token * block.lanes_stride
            out = block.predicted + token * block.predicted_stride
            multiply_listed_rows(rows, own, count, lanes, out, rows)
        first += count * threads
    barrier(pool, thread)
    if block.rectified != 0:
        for token in range(thread, tokens, threads):
            x = step_args.x + token * step_args.x_stride
            rectify(block.predicted + token * block.predicted_stride, rank, x, norm)
        barrier(pool, thread)
    for token in range(tokens):
        to = own + block.predicted_offset + token * block.predicted_quantized_stride
        quantize_blocks(block.predicted + token * block.predicted_stride, to, 0, rank)
