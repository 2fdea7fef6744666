"""From router scores to experts, their weights, and the rows of their activations."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.thread_pool import next_item
from edgeinfer_kernels.cpu.native.moe.expert_ranks import largest_score, rank_experts, sum_of_exponentials
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import add, lanes_max, load_floats, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.simd.scalars import (
    load_f32,
    load_i64,
    load_u8,
    store_f32,
    store_i8,
    store_i64,
)
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential, sigmoid
from edgeinfer_kernels.cpu.runtime.abi import ELSEWHERE, GATING_CODES, MIN_WEIGHT_SUM

SOFTMAX, SIGMOID = GATING_CODES["softmax"], GATING_CODES["sigmoid"]
MIN_SUM = np.float32(MIN_WEIGHT_SUM)


@device_function
def take_best(scores, count, experts_per_token, ids, weights, taken):
    """The `experts_per_token` largest scores, descending; ties go to the lower expert. NaN counts as largest,
    so that it propagates to the result. `taken` is scratch.
    """
    for expert in range(count):
        store_i8(taken + expert, 0)
    for slot in range(experts_per_token):
        best = -1
        best_score = np.float32(0)
        for expert in range(count):
            if load_u8(taken + expert) == 0:
                score = load_f32(scores + 4 * expert)
                is_first_nan = score != score and best_score == best_score
                if best < 0 or score > best_score or is_first_nan:
                    best = expert
                    best_score = score
        store_i8(taken + best, 1)
        store_i64(ids + 8 * slot, best)
        store_f32(weights + 4 * slot, best_score)


@device_function
def take_ranked(block, scores, ranks, ids, weights, scratch):
    """As `take_best` of the ranks of experts; `weights` become the scores of the selected experts."""
    experts_per_token = block.experts_per_token
    rank_experts(block, scores, ranks, scratch)
    take_best(ranks, block.count, experts_per_token, ids, weights, scratch)
    for slot in range(experts_per_token):
        score = load_f32(scores + 4 * load_i64(ids + 8 * slot))
        store_f32(weights + 4 * slot, score)


@device_function
def expert_weights_from_scores(block, scores, weights):
    """Convert the selected scores in `weights` to the weights of their experts."""
    experts_per_token = block.experts_per_token
    gating = block.gating
    top = load_f32(weights) if block.selection == 0 else largest_score(scores, block.count)
    total = np.float32(1)
    if gating == SOFTMAX:
        total = sum_of_exponentials(scores, block.count, top)
    elif gating != SIGMOID:
        total = sum_of_exponentials(weights, experts_per_token, top)
    whole = np.float32(0)
    for slot in range(experts_per_token):
        score = load_f32(weights + 4 * slot)
        if gating == SIGMOID:
            weight = lanes_max(sigmoid(splat_f32(score)))
        else:
            weight = lanes_max(exponential(splat_f32(score - top))) / total
        store_f32(weights + 4 * slot, weight)
        whole += weight
    scale = block.weight_scale
    if block.normalized != 0:
        scale /= max(whole, MIN_SUM)
    for slot in range(experts_per_token):
        store_f32(weights + 4 * slot, load_f32(weights + 4 * slot) * scale)


@device_function
def select_experts(pool, counter, block, step_args, scratch):
    """Phase: select every token's experts and their weights."""
    experts_per_token = block.experts_per_token
    count = block.count
    bias = block.router.bias
    while True:
        token = next_item(pool, counter)
        if token >= step_args.tokens:
            break
        scores = block.scores + token * block.scores_stride
        if bias != 0:
            for i in range(0, count, 16):
                store_floats(scores + 4 * i, add(load_floats(scores + 4 * i), load_floats(bias + 4 * i)))
        ids = block.ids + token * block.ids_stride
        weights = block.weights + 4 * experts_per_token * token
        if block.selection != 0:
            ranks = block.selection + token * block.selection_stride
            take_ranked(block, scores, ranks, ids, weights, scratch)
        else:
            take_best(scores, count, experts_per_token, ids, weights, scratch)
        expert_weights_from_scores(block, scores, weights)
        scales = block.expert_scales
        if scales != 0:
            for slot in range(experts_per_token):
                scale = load_f32(scales + 4 * load_i64(ids + 8 * slot))
                store_f32(weights + 4 * slot, load_f32(weights + 4 * slot) * scale)


@device_function
def rows_taken(block, assignments):
    """Rows for an expert's assignments: rounded up to whole tiles if they are stored as tiles."""
    first = block.gathered.tile_tokens
    then = block.hidden.tile_tokens
    if assignments >= min(first, then):
        return (assignments + 15) // 16 * 16
    return assignments


@device_function
def list_experts(block, assignments_of):
    """Fill `active` from the number of assignments of each expert; `assignments_of` becomes the entry index
    of each expert.
    """
    active = 0
    row = 0
    for expert in range(block.count):
        assignments = load_i64(assignments_of + 8 * expert)
        if assignments > 0:
            entry = block.active.experts[active]
            entry.expert = expert
            entry.first_row = row
            entry.assignments = 0
            store_i64(assignments_of + 8 * expert, active)
            active += 1
            row += rows_taken(block, assignments)
    block.active.count = active


@device_function
def count_assignments(block, seen, here):
    """Add to the counters of token-expert assignments."""
    block.assignments_seen = block.assignments_seen + seen
    block.assignments_here = block.assignments_here + here


@device_function
def count_request(block, expert):
    """Increment an expert's request count, on either device, if requests are counted."""
    requests = block.requests
    if requests != 0:
        count = requests + 8 * (expert if expert >= 0 else ELSEWHERE - expert)
        store_i64(count, load_i64(count) + 1)


@device_function
def sort_by_expert(block, tokens, scratch):
    """Assign rows to all token-expert assignments, grouped by expert, in token order; -1 for an expert (below
    0) that is not on this host.
    """
    experts_per_token = block.experts_per_token
    here = 0
    for expert in range(block.count):
        store_i64(scratch + 8 * expert, 0)
    for token in range(tokens):
        ids = block.ids + token * block.ids_stride
        for slot in range(experts_per_token):
            expert = load_i64(ids + 8 * slot)
            count_request(block, expert)
            if expert >= 0:
                store_i64(scratch + 8 * expert, load_i64(scratch + 8 * expert) + 1)
                here += 1
    count_assignments(block, tokens * experts_per_token, here)
    list_experts(block, scratch)
    for token in range(tokens):
        ids = block.ids + token * block.ids_stride
        for slot in range(experts_per_token):
            assignment = 8 * (token * experts_per_token + slot)
            expert = load_i64(ids + 8 * slot)
            if expert < 0:
                store_i64(block.assignment_rows + assignment, -1)
                continue
            index = load_i64(scratch + 8 * expert)
            entry = block.active.experts[index]
            assignments = entry.assignments
            store_i64(block.entries + assignment, index)
            store_i64(block.assignment_rows + assignment, entry.first_row + assignments)
            entry.assignments = assignments + 1
