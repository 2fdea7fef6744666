"""The ranks by which experts are selected, if these aren't in the order of the scores."""

import numpy as np

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    divide,
    lanes_max,
    load_floats,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, store_f32
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential, sigmoid
from edgeinfer_kernels.cpu.runtime.abi import GATING_CODES

SOFTMAX = GATING_CODES["softmax"]
LOWEST = np.float32(-np.inf)


@device_function
def largest_score(scores, count):
    """The maximum; NaN if the first score is one."""
    top = load_f32(scores)
    for i in range(1, count):
        top = max(top, load_f32(scores + 4 * i))
    return top


@device_function
def sum_of_exponentials(scores, count, top):
    """Σ e^(score - top)."""
    total = np.float32(0)
    for i in range(count):
        total += lanes_max(exponential(splat_f32(load_f32(scores + 4 * i) - top)))
    return total


@device_function
def rank_experts(block, scores, ranks, group_scores):
    """Ranks (count,): softmax or sigmoid of the scores, plus the bias if there is one; -inf in groups that no
    expert is selected from. `group_scores` is scratch.
    """
    count = block.count
    gating = block.gating
    bias = block.selection_bias
    largest = largest_score(scores, count)
    top = splat_f32(largest)
    total = splat_f32(sum_of_exponentials(scores, count, largest) if gating == SOFTMAX else np.float32(1))
    for i in range(0, count, 16):
        score = load_floats(scores + 4 * i)
        rank = divide(exponential(subtract(score, top)), total) if gating == SOFTMAX else sigmoid(score)
        if bias != 0:
            rank = add(rank, load_floats(bias + 4 * i))
        store_floats(ranks + 4 * i, rank)
    if block.groups > 1:
        keep_best_groups(block, ranks, group_scores)


@device_function
def score_group(ranks, size):
    """The sum of the two best ranks of a group."""
    first = load_f32(ranks)
    second = LOWEST
    for i in range(1, size):
        rank = load_f32(ranks + 4 * i)
        if rank > first:
            second = first
            first = rank
        elif rank > second:
            second = rank
    return first + second


@device_function
def keep_best_groups(block, ranks, group_scores):
    """Set the ranks in all but the best `groups_per_token` groups to -inf; ties go to the lower group."""
    groups = block.groups
    size = block.count // groups
    for group in range(groups):
        store_f32(group_scores + 4 * group, score_group(ranks + 4 * size * group, size))
    for group in range(groups):
        score = load_f32(group_scores + 4 * group)
        better = 0
        for other in range(groups):
            other_score = load_f32(group_scores + 4 * other)
            if other_score > score or (other_score == score and other < group):
                better += 1
        if better >= block.groups_per_token:
            for i in range(size * group, size * (group + 1)):
                store_f32(ranks + 4 * i, LOWEST)
