"""The online softmax state of a query head over some positions.

A *state* is the largest score, the sum of exponentials relative to it, and the values weighted by these
exponentials (`STATE_BYTES` + 4 bytes per padded dimension). States of different positions can be merged
exactly. Source: Milakov and Gimelshein 2018; Dao et al. 2022, §3.1.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    first_lane,
    keep_lanes,
    lanes_max,
    lanes_sum,
    load_floats,
    maximum,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, SCORES_BYTES
from edgeinfer_kernels.cpu.runtime.abi import POSITIONS_PER_TILE as TILE

NEGATIVE = np.float32(-1e30)
LANES = 16
STATE_BYTES = CACHE_LINE
DECAY = 8
"""Offset in a state of the factor by which its values must be scaled next, after the largest score and the
sum.
"""


@device_function
def clear_states(states, group, padded):
    """Initialize empty states for `group` heads."""
    for g in range(group):
        state = states + g * (STATE_BYTES + 4 * padded)
        store_f32(state, NEGATIVE)
        store_f32(state + 4, np.float32(0))
        for d in range(0, padded, LANES):
            store_floats(state + STATE_BYTES + 4 * d, splat_f32(np.float32(0)))


@device_function
def add_sink(state, score, padded):
    """Add one more score to the sum, without a value."""
    top = max(load_f32(state), score)
    decay = first_lane(exponential(splat_f32(load_f32(state) - top)))
    sink_weight = first_lane(exponential(splat_f32(score - top)))
    store_f32(state, top)
    store_f32(state + 4, load_f32(state + 4) * decay + sink_weight)
    for d in range(STATE_BYTES, STATE_BYTES + 4 * padded, 4 * LANES):
        store_floats(state + d, multiply(load_floats(state + d), splat_f32(decay)))


@device_function
def merge_state(into, state, padded):
    """Merge `state` into `into`."""
    top = max(load_f32(into), load_f32(state))
    into_factor = first_lane(exponential(splat_f32(load_f32(into) - top)))
    state_factor = first_lane(exponential(splat_f32(load_f32(state) - top)))
    store_f32(into, top)
    store_f32(into + 4, load_f32(into + 4) * into_factor + load_f32(state + 4) * state_factor)
    for d in range(STATE_BYTES, STATE_BYTES + 4 * padded, 4 * LANES):
        scaled = multiply(load_floats(into + d), splat_f32(into_factor))
        store_floats(into + d, multiply_add(load_floats(state + d), splat_f32(state_factor), scaled))


@device_function
def write_states(states, group, head_dim, padded, out):
    """The weighted values divided by their sum: `group` heads of `head_dim` floats, contiguous."""
    for g in range(group):
        state = states + g * (STATE_BYTES + 4 * padded)
        inverse = np.float32(1) / load_f32(state + 4)
        values, row = state + STATE_BYTES, out + 4 * head_dim * g
        whole = head_dim // LANES * LANES
        for d in range(0, whole, LANES):
            store_floats(row + 4 * d, multiply(load_floats(values + 4 * d), splat_f32(inverse)))
        for d in range(whole, head_dim):
            store_f32(row + 4 * d, load_f32(values + 4 * d) * inverse)


@device_function
def add_alibi(block, head, distance, scores):
    """Add slope · (key position - query position) to the scores of a tile, whose first key is at `distance`
    from the query; the block of a model without ALiBi has no slopes.
    """
    if block.slopes != 0:
        slope = splat_f32(load_f32(block.slopes + 4 * head))
        lanes = load_floats(block.lane_indices)
        for i in range(0, TILE, LANES):
            distances = add(lanes, splat_f32(np.float32(distance + i)))
            store_floats(scores + 4 * i, multiply_add(slope, distances, load_floats(scores + 4 * i)))


@device_function
def mask_scores(scores, first, last):
    """Mask the positions of a tile before `first` and, in its last register, from `last` on; return the
    largest remaining score.
    """
    largest = splat_f32(NEGATIVE)
    for i in range(0, last, LANES):
        # Whole vectors: a load that spans several stores would wait for them.
        kept = keep_lanes(load_floats(scores + 4 * i), first - i, last - i, NEGATIVE)
        store_floats(scores + 4 * i, kept)
        largest = maximum(largest, kept)
    return lanes_max(largest)


@device_function
def exponentiate(scores, top, last):
    """scores = exp(score - top) before `last`, 0 where masked; return their sum."""
    total = splat_f32(np.float32(0))
    for i in range(0, last, LANES):
        weight = exponential(subtract(load_floats(scores + 4 * i), splat_f32(top)))
        store_floats(scores + 4 * i, weight)
        total = add(total, weight)
    return lanes_sum(total)


@device_function
def weigh_scores(states, step, heads, scores, first, last):
    """Convert the scores of a tile to weights relative to the running maximum; update the maximum, sum and
    decay of the states, which are `step` bytes apart, of some heads.

    All maxima first: those of one head wait for each other, those of several don't.
    """
    for head in range(heads):
        state = states + head * step
        top = load_f32(state)
        largest = max(top, mask_scores(scores + head * SCORES_BYTES, first, last))
        store_f32(state, largest)
        store_f32(state + DECAY, top - largest)
    for head in range(heads):
        state = states + head * step
        total = exponentiate(scores + head * SCORES_BYTES, load_f32(state), last)
        decay = first_lane(exponential(splat_f32(load_f32(state + DECAY))))
        store_f32(state + 4, load_f32(state + 4) * decay + total)
        store_f32(state + DECAY, decay)
