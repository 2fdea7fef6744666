"""LoRA adapters: what they add to the products of a matrix.

Each thread computes the `rank` products a·x of every token itself, which needs no barrier, and adds b·(a·x)
to the rows that it has multiplied. The sums of a token have the same order in any batch of tokens.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32

GROUP_BYTES = 64
"""Bytes of a column of sixteen float32 rows."""


@device_function
def add_columns(weights, factors, count, first):
    """`first` plus `count` columns of sixteen rows, each times its factor: sixteen float32."""
    t0 = first
    t1 = splat_f32(np.float32(0))
    t2 = splat_f32(np.float32(0))
    t3 = splat_f32(np.float32(0))
    for column in range(0, count, 4):
        w = weights + GROUP_BYTES * column
        at = factors + 4 * column
        t0 = multiply_add(load_floats(w), splat_f32(load_f32(at)), t0)
        t1 = multiply_add(load_floats(w + GROUP_BYTES), splat_f32(load_f32(at + 4)), t1)
        t2 = multiply_add(load_floats(w + 2 * GROUP_BYTES), splat_f32(load_f32(at + 8)), t2)
        t3 = multiply_add(load_floats(w + 3 * GROUP_BYTES), splat_f32(load_f32(at + 12)), t3)
    return add(add(t0, t1), add(t2, t3))


@device_function
def multiply_a(a, columns, ranks, rows, stride, tokens, out):
    """out[t] = a · row t, float32: reads a once per token, 4 bytes per weight."""
    for group in range(ranks // 16):
        weights = a + group * columns * GROUP_BYTES
        for token in range(tokens):
            x = rows + token * stride
            total = add_columns(weights, x, columns, splat_f32(np.float32(0)))
            store_floats(out + 4 * ranks * token + GROUP_BYTES * group, total)


@device_function
def lora_products(lora, expert, thread, slot, rows, stride, tokens):
    """Address of a·x of each of the float32 `rows`, in a slot of this thread; 0: there is no adapter."""
    if lora.address == 0:
        return 0
    products = lora.products + thread * lora.thread_bytes + slot * lora.slot_bytes
    a = lora.a + expert * lora.a_stride
    multiply_a(a, lora.columns, lora.ranks, rows, stride, tokens, products)
    return products


@device_function
def add_lora(lora, expert, products, first, last, tokens, out, out_stride):
    """out[t] += rows first…last of b · `products` of token t; nothing without an adapter."""
    if lora.address == 0:
        return
    rank = lora.rank
    row_bytes = 4 * lora.ranks
    b = lora.b + expert * lora.b_stride
    for index in range(first // 16, (last + 15) // 16):
        weights = b + index * rank * GROUP_BYTES
        for token in range(tokens):
            at = out + token * out_stride + GROUP_BYTES * index
            factors = products + token * row_bytes
            store_floats(at, add_columns(weights, factors, rank, load_floats(at)))


@device_function
def add_lora_embedding(lora, row, out):
    """out += row `row` of b · a, for a row-major adapter of the embedding: a (rank, columns), b (vocabulary,
    rank).
    """
    if lora.address == 0:
        return
    columns = lora.columns
    factors = lora.b + 4 * lora.rank * row
    for column in range(0, columns, 16):
        total = load_floats(out + 4 * column)
        for index in range(lora.rank):
            factor = splat_f32(load_f32(factors + 4 * index))
            total = multiply_add(load_floats(lora.a + 4 * (columns * index + column)), factor, total)
        store_floats(out + 4 * column, total)
