"""The attention block: norm, projections, rotation, cache, softmax over the past, output, residual.

`attention_block` does a whole block for some tokens with all threads of a team. `ATTENTION` names what is
fixed when the model is loaded: facts, and addresses of matrices, cache and workspace.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.exports import Exports, inner
from edgeinfer_kernels.cpu.native.float_lanes import (
    add,
    lanes_max,
    lanes_sum,
    load_floats,
    load_halves,
    maximum,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    store_halves,
    subtract,
)
from edgeinfer_kernels.cpu.native.phases import (
    add_residual,
    normalise,
    normalise_and_quantise,
    project,
    quantise_input,
)
from edgeinfer_kernels.cpu.native.scalars import load_f32, load_i64, store_f32
from edgeinfer_kernels.cpu.native.team import barrier, next_item
from edgeinfer_kernels.cpu.native.vector_math import exponential, hyperbolic_tangent
from edgeinfer_kernels.cpu.structures import ATTENTION, CALL, INPUT, MATRIX, NORM, ROWS_SCRATCH
from edgeinfer_kernels.cpu.structures import POSITIONS_A_TILE as TILE

NEGATIVE = np.float32(-1e30)


@inner
def rotate(head, table, dimensions, halves):
    """RoPE in place: pairs (i, i+1), or (i, i + dimensions/2) if `halves`; table: cosines, then sines."""
    half = dimensions // 2
    for i in range(half):
        cosine = load_f32(table + 4 * i)
        sine = load_f32(table + 4 * (half + i))
        first = head + 4 * i if halves else head + 8 * i
        second = head + 4 * (i + half) if halves else head + 8 * i + 4
        a = load_f32(first)
        b = load_f32(second)
        store_f32(first, a * cosine - b * sine)
        store_f32(second, a * sine + b * cosine)


@inner
def copy_padded(source, target, count, padded):
    """`count` floats, then zeros up to `padded`."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store_floats(target + 4 * i, load_floats(source + 4 * i))
    if whole < padded:
        store_floats(target + 4 * whole, splat_f32(np.float32(0)))
        for i in range(whole, count):
            store_f32(target + 4 * i, load_f32(source + 4 * i))


@inner
def take_head(block, matrix, norm, row, index, target):
    """Head `index` of a projected row: bias, q/k norm, to `target` padded. norm = 0: none."""
    head_dim = load_i64(block + ATTENTION.head_dim)
    padded = load_i64(block + ATTENTION.padded_head)
    qk_norm = load_i64(block + ATTENTION.qk_norm)
    copy_padded(row + 4 * head_dim * index, target, head_dim, padded)
    bias = load_i64(matrix + MATRIX.bias)
    if bias != 0:
        for i in range(head_dim):
            place = target + 4 * i
            store_f32(place, load_f32(place) + load_f32(bias + 4 * (head_dim * index + i)))
    if norm != 0 and qk_norm == 1:
        normalise(norm, target, target)
    elif norm != 0 and qk_norm == 2:
        scale_by_row(norm, row, load_i64(matrix + MATRIX.rows), head_dim * index, head_dim, target)


@inner
def scale_by_row(norm, row, rows, first, count, target):
    """RMS norm over a whole projected row, applied to `count` values from `first`, in `target`."""
    square = np.float32(0)
    for i in range(rows):
        value = load_f32(row + 4 * i)
        square += value * value
    epsilon = load_f32(norm + NORM.epsilon)
    scale = np.float32(1) / np.float32(np.sqrt(square / np.float32(rows) + epsilon))
    weight = load_i64(norm + NORM.weight) + 4 * first
    for i in range(count):
        store_f32(target + 4 * i, load_f32(target + 4 * i) * scale * load_f32(weight + 4 * i))


@inner
def store_in_cache(block, cache, kv_head, position, row):
    padded = load_i64(block + ATTENTION.padded_head)
    element = (kv_head * load_i64(block + ATTENTION.context) + position) * padded
    if load_i64(block + ATTENTION.half_cache) != 0:
        for i in range(0, padded, 16):
            store_halves(cache + 2 * (element + i), load_floats(row + 4 * i))
    else:
        for i in range(0, padded, 16):
            store_floats(cache + 4 * (element + i), load_floats(row + 4 * i))


@inner
def rotate_and_store(team, counter, block, call, scratch):
    """Phase: queries to their padded place, keys and values to the cache, head by head."""
    heads = load_i64(block + ATTENTION.heads)
    kv_heads = load_i64(block + ATTENTION.kv_heads)
    rope_dim = load_i64(block + ATTENTION.rope_dim)
    halves = load_i64(block + ATTENTION.rope_halves) != 0
    head = scratch + ROWS_SCRATCH
    while True:
        item = next_item(team, counter)
        token = item // (heads + 2 * kv_heads)
        if token >= load_i64(call + CALL.tokens):
            break
        index = item - token * (heads + 2 * kv_heads)
        position = load_i64(call + CALL.start) + token
        table = load_i64(call + CALL.rope) + 4 * rope_dim * token
        kv_offset = token * load_i64(block + ATTENTION.kv_stride)
        if index < heads:
            row = load_i64(block + ATTENTION.projected_q) + token * load_i64(block + ATTENTION.q_stride)
            target = load_i64(block + ATTENTION.queries) + token * load_i64(block + ATTENTION.query_stride)
            target += 4 * load_i64(block + ATTENTION.padded_head) * index
            norm = load_i64(block + ATTENTION.q_norm)
            take_head(block, load_i64(block + ATTENTION.q_matrix), norm, row, index, target)
            rotate(target, table, rope_dim, halves)
        elif index < heads + kv_heads:
            kv_head = index - heads
            row = load_i64(block + ATTENTION.projected_k) + kv_offset
            norm = load_i64(block + ATTENTION.k_norm)
            take_head(block, load_i64(block + ATTENTION.k_matrix), norm, row, kv_head, head)
            rotate(head, table, rope_dim, halves)
            store_in_cache(block, load_i64(block + ATTENTION.key_cache), kv_head, position, head)
        else:
            kv_head = index - heads - kv_heads
            row = load_i64(block + ATTENTION.projected_v) + kv_offset
            take_head(block, load_i64(block + ATTENTION.v_matrix), 0, row, kv_head, head)
            store_in_cache(block, load_i64(block + ATTENTION.value_cache), kv_head, position, head)


def make_attend(load_cached, element_bytes):
    """Attention of one token's query heads that share a key head, for a cache of one element type."""

    @inner
    def score_tile(query, keys, count, padded, scale, soft_cap, scores):
        """scores[i] = scale · q·k_i, soft-capped, -1e30 from `count` to TILE; returns the largest."""
        for i in range(count):
            total = splat_f32(np.float32(0))
            key = keys + element_bytes * padded * i
            for d in range(0, padded, 16):
                cached = load_cached(key + element_bytes * d)
                total = multiply_add(load_floats(query + 4 * d), cached, total)
            store_f32(scores + 4 * i, lanes_sum(total) * scale)
        for i in range(count, TILE):
            store_f32(scores + 4 * i, NEGATIVE)
        largest = splat_f32(NEGATIVE)
        for i in range(0, TILE, 16):
            s = load_floats(scores + 4 * i)
            if soft_cap > np.float32(0) and i < count:
                cap = splat_f32(soft_cap)
                s = multiply(cap, hyperbolic_tangent(multiply(s, splat_f32(np.float32(1) / soft_cap))))
                store_floats(scores + 4 * i, s)
            largest = maximum(largest, s)
        return lanes_max(largest)

    @inner
    def weigh_tile(scores, values, count, padded, top, decay, mixed):
        """mixed = mixed·decay + Σ exp(score - top)·value; returns Σ exp(score - top)."""
        total = splat_f32(np.float32(0))
        for i in range(0, count, 16):
            weight = exponential(subtract(load_floats(scores + 4 * i), splat_f32(top)))
            store_floats(scores + 4 * i, weight)
            for beyond in range(count, i + 16):
                store_f32(scores + 4 * beyond, np.float32(0))
            total = add(total, load_floats(scores + 4 * i))
        for d in range(0, padded, 16):
            column = multiply(load_floats(mixed + 4 * d), splat_f32(decay))
            value = values + element_bytes * d
            for i in range(count):
                cached = load_cached(value + element_bytes * padded * i)
                column = multiply_add(splat_f32(load_f32(scores + 4 * i)), cached, column)
            store_floats(mixed + 4 * d, column)
        return lanes_sum(total)

    @inner
    def attend(block, query, kv_head, position, out, scratch):
        """Online softmax, tile by tile, so that a tile of keys and values serves all heads of the group."""
        padded = load_i64(block + ATTENTION.padded_head)
        head_dim = load_i64(block + ATTENTION.head_dim)
        group = load_i64(block + ATTENTION.heads) // load_i64(block + ATTENTION.kv_heads)
        scale = load_f32(block + ATTENTION.scale)
        soft_cap = load_f32(block + ATTENTION.soft_cap)
        window = load_i64(block + ATTENTION.window)
        context = load_i64(block + ATTENTION.context)
        scores = scratch + ROWS_SCRATCH
        state_bytes = 64 + 4 * padded
        states = scores + 4 * TILE
        for g in range(group):
            state = states + g * state_bytes
            store_f32(state, NEGATIVE)
            store_f32(state + 4, np.float32(0))
            for d in range(0, padded, 16):
                store_floats(state + 64 + 4 * d, splat_f32(np.float32(0)))
        begin = max(0, position + 1 - window) if window > 0 else 0
        for tile in range(begin, position + 1, TILE):
            count = min(TILE, position + 1 - tile)
            offset = element_bytes * padded * (kv_head * context + tile)
            keys = load_i64(block + ATTENTION.key_cache) + offset
            values = load_i64(block + ATTENTION.value_cache) + offset
            for g in range(group):
                state = states + g * state_bytes
                top = load_f32(state)
                q = query + 4 * padded * g
                new_top = max(top, score_tile(q, keys, count, padded, scale, soft_cap, scores))
                decay = lanes_max(exponential(splat_f32(top - new_top)))
                total = weigh_tile(scores, values, count, padded, new_top, decay, state + 64)
                store_f32(state, new_top)
                store_f32(state + 4, load_f32(state + 4) * decay + total)
        for g in range(group):
            state = states + g * state_bytes
            inverse = splat_f32(np.float32(1) / load_f32(state + 4))
            for d in range(0, padded, 16):
                store_floats(state + 64 + 4 * d, multiply(load_floats(state + 64 + 4 * d), inverse))
            for d in range(head_dim):
                store_f32(out + 4 * (head_dim * g + d), load_f32(state + 64 + 4 * d))

    return attend


attend_halves = make_attend(load_halves, 2)
attend_floats = make_attend(load_floats, 4)


@inner
def attend_all(team, counter, block, call, scratch):
    """Phase: every token's every key head, written to the rows of `mixed`."""
    kv_heads = load_i64(block + ATTENTION.kv_heads)
    heads = load_i64(block + ATTENTION.heads)
    group = heads // kv_heads
    mixed = load_i64(block + ATTENTION.mixed)
    while True:
        item = next_item(team, counter)
        token = item // kv_heads
        if token >= load_i64(call + CALL.tokens):
            break
        kv_head = item - token * kv_heads
        position = load_i64(call + CALL.start) + token
        query = load_i64(block + ATTENTION.queries) + token * load_i64(block + ATTENTION.query_stride)
        query += 4 * load_i64(block + ATTENTION.padded_head) * group * kv_head
        out = load_i64(mixed + INPUT.floats) + token * load_i64(mixed + INPUT.float_stride)
        out += 4 * load_i64(block + ATTENTION.head_dim) * group * kv_head
        if load_i64(block + ATTENTION.half_cache) != 0:
            attend_halves(block, query, kv_head, position, out, scratch)
        else:
            attend_floats(block, query, kv_head, position, out, scratch)


exports = Exports()


@exports.add("attention_block", 4)
def attention_block(block, call, team, thread):
    """x += scale · norm(W_o · attention(norm(x))) for the tokens of `call`; keys and values are kept."""
    tokens = load_i64(call + CALL.tokens)
    scratch = load_i64(block + ATTENTION.scratch) + thread * load_i64(block + ATTENTION.scratch_stride)
    normed = load_i64(block + ATTENTION.normed)
    mixed = load_i64(block + ATTENTION.mixed)
    q_stride = load_i64(block + ATTENTION.q_stride)
    kv_stride = load_i64(block + ATTENTION.kv_stride)
    output = load_i64(block + ATTENTION.output_matrix)
    projected = load_i64(block + ATTENTION.projected)
    stride = load_i64(block + ATTENTION.projected_stride)
    normalise_and_quantise(team, 0, call, load_i64(block + ATTENTION.norm), normed)
    barrier(team)
    q = load_i64(block + ATTENTION.projected_q)
    k = load_i64(block + ATTENTION.projected_k)
    v = load_i64(block + ATTENTION.projected_v)
    project(team, 1, tokens, load_i64(block + ATTENTION.q_matrix), normed, q, q_stride, scratch)
    project(team, 2, tokens, load_i64(block + ATTENTION.k_matrix), normed, k, kv_stride, scratch)
    project(team, 3, tokens, load_i64(block + ATTENTION.v_matrix), normed, v, kv_stride, scratch)
    barrier(team)
    rotate_and_store(team, 4, block, call, scratch)
    barrier(team)
    attend_all(team, 5, block, call, scratch)
    barrier(team)
    quantise_input(team, 6, call, mixed)
    barrier(team)
    project(team, 7, tokens, output, mixed, projected, stride, scratch)
    barrier(team)
    scale = load_f32(block + ATTENTION.residual_scale)
    add_residual(team, 8, call, output, projected, stride, load_i64(block + ATTENTION.post_norm), scale)
