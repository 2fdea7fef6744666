"""The phases that attention and feed-forward share: norm, quantization, projection, residual addition.

Every phase is called by all threads of the pool and distributes its work through a counter. A barrier
separates a phase from the next one that reads its results.
"""

import numpy as np

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier_and_clear,
    barrier_prefetching,
    next_item,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.lora import add_lora, lora_products
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import call_pointer_10, has_wide_registers, load_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import layer_norm, rms_norm
from edgeinfer_kernels.cpu.runtime.abi import FEW_TOKENS, SHARED_INPUT
from edgeinfer_kernels.cpu.runtime.kernel_args import InputArgs

COLUMNS_PER_PIECE = 512
ROW_CHUNKS_PER_THREAD = 8
ROWS_PER_PAIR = 2 * ROWS_PER_GROUP
"""The kernels for several tokens process two groups of rows together."""
FIXED_BYTES_PER_THREAD = 64 << 10
"""Weights per thread of a matrix up to which each thread has a fixed range: a few us."""
PREFETCH_BYTES = 128 << 10
"""Maximum bytes of weights that a thread prefetches at a barrier: they stay in the L2 cache."""


@device_function
def normalize(norm, x, out):
    """Apply the norm `norm` to one row; float32, zero-padded to 16."""
    kind = norm.kind
    width = norm.width
    padded = norm.padded
    weight = norm.weight
    epsilon = norm.epsilon
    if kind == 1:
        rms_norm(x, weight, out, width, padded, epsilon)
        add_bias(out, norm.bias, padded)
    elif kind == 2:
        layer_norm(x, weight, norm.bias, out, width, padded, epsilon)
    else:
        for i in range(0, padded, 16):
            store_floats(out + 4 * i, load_floats(x + 4 * i))


@device_function
def normalize_and_quantize(pool, counter, thread, step_args, norm, target):
    """Phase: write every token's normed x to the rows of `target`, in the input formats of the matrices;
    nothing if the block before it did.
    """
    if norm.kind == SHARED_INPUT:
        return
    tokens = step_args.tokens
    columns = target.columns
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        row = target.floats + token * target.float_stride
        normalize(norm, x, row)
        write_activations(row, target, token, tokens, 0, columns)
        token = next_token(pool, counter, tokens, token)


@device_function
def read_input(pool, thread, step_args, norm, target, matrix):
    """Phase of counter 0 and its barrier: as `normalize_and_quantize`; returns the rows for this thread. In
    steps of few tokens these may be rows of each thread, which needs no barrier: a barrier takes longer than
    the rows. `matrix`: multiplies them first.
    """
    tokens = step_args.tokens
    if tokens > target.own_tokens:
        normalize_and_quantize(pool, 0, thread, step_args, norm, target)
        ahead, end = first_weights(pool, thread, tokens, matrix)
        barrier_prefetching(pool, thread, ahead, end)
        return target
    own = InputArgs(target.own)[thread]
    for token in range(tokens):
        row = own.floats + token * own.float_stride
        normalize(norm, step_args.x + token * step_args.x_stride, row)
        write_activations(row, own, token, tokens, 0, own.columns)
    return own


@device_function
def normalize_rows(pool, counter, thread, step_args, norm, target):
    """Phase: the norm of every row of `target`, in place and in the input formats of the matrices."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        row = target.floats + token * target.float_stride
        normalize(norm, row, row)
        write_activations(row, target, token, tokens, 0, target.columns)
        token = next_token(pool, counter, tokens, token)


@device_function
def next_piece(pool, counter, columns):
    """(row, first, last): the next piece of rows of `columns` columns, at most COLUMNS_PER_PIECE columns."""
    pieces = (columns + COLUMNS_PER_PIECE - 1) // COLUMNS_PER_PIECE
    item = next_item(pool, counter)
    row = item // pieces
    first = (item - row * pieces) * COLUMNS_PER_PIECE
    return row, first, min(columns, first + COLUMNS_PER_PIECE)


@device_function
def operands(matrix, source):
    """(address, bytes per row): the rows of `source` in the input format of the matrix."""
    if matrix.quantized != 0:
        return source.quantized, source.quantized_stride
    return source.floats, source.float_stride


@device_function
def kernel_for(matrix, source, tokens):
    """Address of the kernel that multiplies a matrix with `tokens` rows of `source`."""
    if matrix.quantized != 0 and tokens >= source.tile_tokens:
        return matrix.tile_kernel
    return matrix.kernel


@device_function
def quantize_input(pool, counter, step_args, target):
    """Phase: quantize the float rows of `target` to the input formats of the matrices, in pieces."""
    if target.quantized == 0:
        return
    tokens = step_args.tokens
    columns = target.columns
    while True:
        token, first, last = next_piece(pool, counter, columns)
        if token >= tokens:
            break
        row = target.floats + token * target.float_stride
        write_activations(row, target, token, tokens, first, last)


@device_function
def multiply_rows(kernel, matrix, first, last, activations, stride, tokens, out, out_stride, scratch):
    """out[t] = rows first…last of a matrix · the activations of token t, with one of its kernels."""
    weights = matrix.weights
    columns = matrix.columns
    call_pointer_10(
        kernel, weights, columns, first, last, activations, stride, tokens, out, out_stride, scratch
    )
    scale_rows(matrix, 0, first, last, tokens, out, out_stride)


@device_function
def scale_rows(matrix, expert, first, last, tokens, out, out_stride):
    """Elements first…last of out[t], rounded up to 16, times the factor of an expert's weights, if any."""
    if matrix.scales == 0:
        return
    factor = splat_f32(load_f32(matrix.scales + 4 * expert))
    for token in range(tokens):
        row = out + token * out_stride
        for i in range(first, last, 16):
            store_floats(row + 4 * i, multiply(load_floats(row + 4 * i), factor))


@device_function
def multiply_input(matrix, source, first, last, tokens, out, out_stride, scratch):
    """out[t] = rows first…last of a matrix · row t of `source`."""
    kernel = kernel_for(matrix, source, tokens)
    activations, stride = operands(matrix, source)
    multiply_rows(kernel, matrix, first, last, activations, stride, tokens, out, out_stride, scratch)


@device_function
def chunks_of(pool, matrix, tokens):
    """(rows per chunk, chunks per thread): the rows of a matrix are split into a contiguous range of chunks
    for each thread.
    """
    in_groups = FEW_TOKENS if has_wide_registers() != 0 else 1
    return chunks_by(pool, matrix, ROWS_PER_PAIR if tokens > in_groups else ROWS_PER_GROUP)


@device_function
def chunks_by(pool, matrix, step):
    """As `chunks_of`; a chunk is a multiple of `step` rows."""
    rows = matrix.rows
    threads = pool.threads
    chunk = max(step, rows // (threads * ROW_CHUNKS_PER_THREAD) // step * step)
    chunks = (rows + chunk - 1) // chunk
    return chunk, (chunks + threads - 1) // threads


@device_function
def first_row(item, threads, chunk, chunks):
    """The first row of chunk `item`: successive items belong to successive threads, each going through its
    range in order.
    """
    return (item % threads * chunks + item // threads) * chunk


@device_function
def next_chunk(pool, counter, item, chunks, matrix):
    """The chunk of a matrix that a thread multiplies after `item`; its first one is that of its index.

    A thread first takes the chunks of its range, most of them or, of a small matrix, all: their weights stay
    in the cache of its core, what a kernel prefetches after a chunk is used, and counting may take as long as
    a chunk. For the last ones it takes the range that has the fewest completed chunks, as threads differ in
    speed.
    """
    threads = pool.threads
    fixed = threads * chunks
    if matrix.rows // ROWS_PER_GROUP * matrix.group_bytes > threads * FIXED_BYTES_PER_THREAD:
        fixed = threads * max(1, chunks * 3 // 4)
    if item + threads < fixed:
        return item + threads
    if fixed == threads * chunks:
        return fixed
    return fixed + next_item(pool, counter)


@device_function
def threads_with_rows(pool, matrix, tokens):
    """How many threads have a range of rows of a matrix."""
    chunk, chunks = chunks_of(pool, matrix, tokens)
    return (matrix.rows + chunk * chunks - 1) // (chunk * chunks)


@device_function
def project(pool, counter, thread, tokens, matrix, source, out, out_stride, scratch):
    """Phase: out[t] = matrix · source[t], without bias; the rows of the matrix are distributed in chunks."""
    project_from(pool, counter, thread, 0, tokens, matrix, source, out, out_stride, scratch)


@device_function
def project_from(pool, counter, thread, first, tokens, matrix, source, out, out_stride, scratch):
    """Phase: as `project`; the first range of rows is that of thread `first`. Returns the thread after the
    last one with a range, for another matrix in the same phase.
    """
    index = (thread + pool.threads - first) % pool.threads
    project_chunks(pool, counter, thread, index, tokens, matrix, source, out, out_stride, scratch, 0, 0, 1)
    return (first + threads_with_rows(pool, matrix, tokens)) % pool.threads


@device_function
def project_chunks(
    pool, counter, thread, index, tokens, matrix, source, out, out_stride, scratch, x, x_stride, scale
):
    """Phase: as `project` for the thread with the range `index`; if `x` isn't 0, also x[t] += scale · (out[t]
    + bias).
    """
    rows = matrix.rows
    threads = pool.threads
    kernel = kernel_for(matrix, source, tokens)
    activations, stride = operands(matrix, source)
    chunk, chunks = chunks_of(pool, matrix, tokens)
    lora = matrix.lora
    products = lora_products(lora, 0, thread, 0, source.floats, source.float_stride, tokens)
    item = index
    while item < threads * chunks:
        first = first_row(item, threads, chunk, chunks)
        if first < rows:
            last = min(rows, first + chunk)
            multiply_rows(kernel, matrix, first, last, activations, stride, tokens, out, out_stride, scratch)
            add_lora(lora, 0, products, first, last, tokens, out, out_stride)
            for token in range(tokens if x != 0 else 0):
                add_piece(x + token * x_stride, out + token * out_stride, matrix.bias, first, last, scale)
        item = next_chunk(pool, counter, item, chunks, matrix)


@device_function
def first_weights(pool, thread, tokens, matrix):
    """(address, end): the first weights that a thread of `project` reads, at most PREFETCH_BYTES."""
    rows = matrix.rows
    chunk, chunks = chunks_of(pool, matrix, tokens)
    first = min(rows, thread * chunks * chunk)
    groups = (min(rows, first + chunk) - first + ROWS_PER_GROUP - 1) // ROWS_PER_GROUP
    group_bytes = matrix.group_bytes
    at = matrix.weights + first // ROWS_PER_GROUP * group_bytes
    return at, at + min(PREFETCH_BYTES, groups * group_bytes)


@device_function
def add_bias(row, bias, columns):
    """row += bias over `columns` rounded up to 16; both are padded."""
    if bias != 0:
        for i in range(0, columns, 16):
            store_floats(row + 4 * i, add(load_floats(row + 4 * i), load_floats(bias + 4 * i)))


@device_function
def add_piece(x, row, bias, first, last, scale):
    """x += scale · (row + bias), in the elements first…last, rounded up to 16."""
    factor = splat_f32(np.float32(scale))
    for i in range(first, last, 16):
        value = load_floats(row + 4 * i)
        if bias != 0:
            value = add(value, load_floats(bias + 4 * i))
        store_floats(x + 4 * i, multiply_add(value, factor, load_floats(x + 4 * i)))


@device_function
def add_residual(pool, counter, thread, step_args, matrix, projected, stride, post_norm, scale):
    """Phase: x += scale · norm(projected + bias)."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        row = projected + token * stride
        add_bias(row, matrix.bias, matrix.rows)
        if post_norm.kind != 0:
            normalize(post_norm, row, row)
        x = step_args.x + token * step_args.x_stride
        add_piece(x, row, 0, 0, post_norm.padded, scale)
        token = next_token(pool, counter, tokens, token)


@device_function
def project_residual(pool, counter, thread, step_args, block, matrix, source, scratch):
    """Phases: x += scale · norm(matrix · source + bias); their counters are `counter` and the next.

    Without a norm each thread adds the rows that it multiplied, so no thread has a phase for itself. The
    counters are 0 at the end, and x is as after `add_residual` or visible to all threads.
    """
    tokens, post_norm, scale = step_args.tokens, block.post_norm, block.residual_scale
    out, stride = block.projected, block.projected_stride
    x = step_args.x if post_norm.kind == 0 else 0
    x_stride = step_args.x_stride
    project_chunks(
        pool, counter, thread, thread, tokens, matrix, source, out, stride, scratch, x, x_stride, scale
    )
    barrier_and_clear(pool, thread)
    if post_norm.kind != 0:
        add_residual(pool, counter + 1, thread, step_args, matrix, out, stride, post_norm, scale)
