"""Bias, norm and RoPE of the heads of a projected row: queries are stored for attention, keys and values in
the cache.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.attention.cache_writing import (
    position_of,
    store_all_keys,
    store_all_values,
    token_args_of,
)
from edgeinfer_kernels.cpu.native.attention.hadamard_heads import hadamard_head
from edgeinfer_kernels.cpu.native.blocks.phases import normalize
from edgeinfer_kernels.cpu.native.blocks.thread_pool import next_token
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_doubled,
    load_floats,
    multiply,
    negate_even,
    splat_f32,
    store_floats,
    subtract,
    swap_pairs,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.runtime.abi import ROWS_SCRATCH, STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.kernel_args import NormArgs


@device_function
def rope_of_pairs(head, table, half_dim):
    """Apply RoPE to pairs (i, i+1) in place, eight at a time; returns how many pairs that were. The products
    and sums are those of single pairs.
    """
    whole = half_dim // 8 * 8
    for i in range(0, whole, 8):
        x = load_floats(head + 8 * i)
        sines = negate_even(load_doubled(table + 4 * (half_dim + i)))
        turned = multiply(swap_pairs(x), sines)
        store_floats(head + 8 * i, add(multiply(x, load_doubled(table + 4 * i)), turned))
    return whole


@device_function
def rope_of_halves(head, table, half_dim):
    """As `rope_of_pairs` for pairs (i, i + half_dim), sixteen at a time."""
    whole = half_dim // 16 * 16
    for i in range(0, whole, 16):
        cosines = load_floats(table + 4 * i)
        sines = load_floats(table + 4 * (half_dim + i))
        a = load_floats(head + 4 * i)
        b = load_floats(head + 4 * (half_dim + i))
        store_floats(head + 4 * i, subtract(multiply(a, cosines), multiply(b, sines)))
        store_floats(head + 4 * (half_dim + i), add(multiply(a, sines), multiply(b, cosines)))
    return whole


@device_function
def apply_rope(head, table, dimensions, is_neox):
    """Apply RoPE in place: pairs (i, i+1), or (i, i + dimensions/2) if `is_neox`; table: cosines, then
    sines.
    """
    half_dim = dimensions // 2
    first_pair = rope_of_halves(head, table, half_dim) if is_neox else rope_of_pairs(head, table, half_dim)
    for i in range(first_pair, half_dim):
        cosine = load_f32(table + 4 * i)
        sine = load_f32(table + 4 * (half_dim + i))
        first = head + 4 * i if is_neox else head + 8 * i
        second = head + 4 * (i + half_dim) if is_neox else head + 8 * i + 4
        a = load_f32(first)
        b = load_f32(second)
        store_f32(first, a * cosine - b * sine)
        store_f32(second, a * sine + b * cosine)


@device_function
def copy_padded(source, target, count, padded):
    """Copy `count` floats, zero-padded to `padded`."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store_floats(target + 4 * i, load_floats(source + 4 * i))
    if whole < padded:
        store_floats(target + 4 * whole, splat_f32(np.float32(0)))
        for i in range(whole, count):
            store_f32(target + 4 * i, load_f32(source + 4 * i))


@device_function
def take_head(block, matrix, norm, row, index, target, head_dim):
    """Copy the `index`-th range of head_dim values of a projected row, with bias, clamp and q/k norm, to
    `target`, padded.

    `norm`: at address 0 for none.
    """
    padded = block.padded_head
    qk_norm = block.qk_norm
    copy_padded(row + 4 * head_dim * index, target, head_dim, padded)
    bias = matrix.bias
    if bias != 0:
        for i in range(head_dim):
            at = target + 4 * i
            store_f32(at, load_f32(at) + load_f32(bias + 4 * (head_dim * index + i)))
    limit = block.clamp
    if limit > 0:
        for i in range(head_dim):
            store_f32(target + 4 * i, min(max(load_f32(target + 4 * i), -limit), limit))
    if norm.address != 0 and qk_norm == 1:
        normalize(norm, target, target)
    elif norm.address != 0 and qk_norm == 2:
        scale_by_row(norm, row, matrix.rows, head_dim * index, head_dim, target)


@device_function
def scale_by_row(norm, row, rows, first, count, target):
    """Apply the RMS norm of a whole projected row to `count` values from `first` on, in `target`."""
    square = np.float32(0)
    for i in range(rows):
        value = load_f32(row + 4 * i)
        square += value * value
    epsilon = norm.epsilon
    scale = np.float32(1) / np.float32(np.sqrt(square / np.float32(rows) + epsilon))
    weight = norm.weight + 4 * first
    for i in range(count):
        store_f32(target + 4 * i, load_f32(target + 4 * i) * scale * load_f32(weight + 4 * i))


@device_function
def scale_query(block, position, query):
    """Multiply a query by the factors of its elements and of its position, if there are any."""
    weights = block.query_weights
    if weights != 0:
        for i in range(0, block.padded_head, 16):
            at = query + 4 * i
            store_floats(at, multiply(load_floats(at), load_floats(weights + 4 * i)))
    scale_by_position(block, position, query, block.padded_head)


@device_function
def scale_by_position(block, position, query, count):
    """Multiply `count` elements of a query by the factor of its position, if there is one."""
    temperatures = block.temperatures
    if temperatures != 0:
        number = (position + block.temperature_offset) // block.temperature_length
        factor = splat_f32(load_f32(temperatures + 4 * number))
        for i in range(0, count, 16):
            store_floats(query + 4 * i, multiply(load_floats(query + 4 * i), factor))


@device_function
def has_hadamard_keys(block):
    """Whether the cache holds keys in the Hadamard basis."""
    return block.cache.key_kind == 3


@device_function
def has_hadamard_values(block):
    """Whether the cache holds values in the Hadamard basis."""
    return block.cache.value_kind == 3


@device_function
def rope_and_store(block, step_args, token, index, head):
    """Store head `index` of a token: a query head in its padded row, or, for larger indices, a key or value
    head in the cache. `head` is scratch.
    """
    heads = block.heads
    kv_heads = block.kv_heads
    rope_dim = block.rope_dim
    is_neox = block.rope_neox != 0
    head_dim = block.head_dim
    padded = block.padded_head
    spare = head + 4 * padded
    token_args = token_args_of(step_args, token)
    position = position_of(step_args, token)
    table = step_args.rope + 4 * rope_dim * (position - step_args.start)
    kv_offset = token * block.kv_stride
    if index < heads:
        row = block.projected_q + token * block.q_stride
        target = block.queries + token * block.query_stride
        target += 4 * padded * index
        norm = block.q_norm
        take_head(block, block.q_matrix, norm, row, index * (1 + block.gated), target, head_dim)
        apply_rope(target, table, rope_dim, is_neox)
        scale_query(block, position, target)
        if has_hadamard_keys(block):
            hadamard_head(target, head_dim, padded)
    elif index < heads + kv_heads:
        kv_head = index - heads
        row = block.projected_k + kv_offset
        norm = block.k_norm
        take_head(block, block.k_matrix, norm, row, kv_head, head, head_dim)
        apply_rope(head, table, rope_dim, is_neox)
        if has_hadamard_keys(block):
            hadamard_head(head, head_dim, padded)
        store_all_keys(block, kv_head, step_args, token_args, position, head, spare)
    else:
        kv_head = index - heads - kv_heads
        row = block.projected_v + kv_offset
        value_dim = block.value_dim
        take_head(block, block.v_matrix, NormArgs(0), row, kv_head, head, value_dim)
        if block.value_norm.address != 0:
            normalize(block.value_norm, head, head)
        if has_hadamard_values(block):
            hadamard_head(head, value_dim, block.padded_value)
        store_all_values(block, kv_head, step_args, token_args, position, head, spare)


@device_function
def share_of_heads(block, pool, tokens, pieces):
    """Number of KV heads that a thread processes alone, with their query heads, so that no barrier is needed.

    Nonzero only in a short step without KV splits in which all threads get the same number of heads; or, with
    one token, the first threads one each, as no more attend, unless each head takes the norm of a whole row.
    0: each phase distributes the heads.
    """
    kv_heads = block.kv_heads
    threads = pool.threads
    if tokens > STEP_TOKENS or pieces > 1:
        return 0
    if tokens == 1 and kv_heads <= threads and block.qk_norm != 2:
        return 1
    return kv_heads // threads if kv_heads % threads == 0 else 0


@device_function
def store_heads(pool, counter, thread, block, step_args, share, scratch):
    """Phase: store queries in their padded rows, keys and values in the cache, head by head; `share` is the
    result of `share_of_heads`.
    """
    heads = block.heads
    kv_heads = block.kv_heads
    group = heads // kv_heads
    others = 0 if block.queries_only != 0 else 2
    every = share * (group + others) if share > 0 else heads + others * kv_heads
    tokens = step_args.tokens
    item = 0 if share > 0 else thread
    while thread * share < kv_heads:
        token = item // every
        if token >= tokens:
            break
        index = item - token * every
        if share > 0:  # The thread's query heads, then its key heads, then its value heads.
            queries = share * group
            if index < queries:
                index += thread * queries
            elif index < queries + share:
                index += heads + thread * share - queries
            else:
                index += heads + kv_heads + thread * share - queries - share
        rope_and_store(block, step_args, token, index, scratch + ROWS_SCRATCH)
        item = item + 1 if share > 0 else next_token(pool, counter, tokens, item)
