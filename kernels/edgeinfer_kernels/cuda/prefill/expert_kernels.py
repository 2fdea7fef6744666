"""Kernels of a decode step's MoE block: expert selection, gate and up, down with the weighted sum.

The matrices of the experts are stacked. A program finds its rows from the ids that the selection kernel has
written to device memory.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.blocks.moe import MIN_WEIGHT_SUM
from edgeinfer_kernels.cuda.decode.gemv_kernels import ROOT_MEAN_SQUARE, inverse_norms
from edgeinfer_kernels.cuda.decode.projections import ROWS, load_ahead, load_pair_ahead, project, project_pair
from edgeinfer_kernels.cuda.triton_ops.activations import activate, activate_gated
from edgeinfer_kernels.cuda.triton_ops.kernel_args import SumSquares
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_OF_SELECTED = tl.constexpr(2)
GATINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_of_selected": SOFTMAX_OF_SELECTED}
MIN_SUM = tl.constexpr(MIN_WEIGHT_SUM)
LOWEST = tl.constexpr(-3.0e38)

UNSHARED = tl.constexpr(0)
SHARED = tl.constexpr(1)
SHARED_AND_WEIGHED = tl.constexpr(2)


@triton.jit
def _best_groups(rank, inside, COUNT: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr):
    """The ranks of experts; LOWEST in all but the groups with the largest sum of their two best ranks."""
    SIZE: tl.constexpr = COUNT // GROUPS
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    expert = tl.arange(0, PADDED)
    group = expert // SIZE
    group_score = tl.full([PADDED], float("-inf"), tl.float32)
    for index in range(GROUPS):
        within = tl.where(inside & (group == index), rank, float("-inf"))
        first = tl.max(within, axis=0)
        second = tl.max(tl.where(expert == tl.argmax(within, axis=0), float("-inf"), within), axis=0)
        group_score = tl.where(group == index, first + second, group_score)
    left = tl.where(inside, group_score, float("-inf"))
    for _ in range(GROUPS_PER_TOKEN):
        best_group = tl.argmax(left, axis=0) // SIZE
        left = tl.where(group == best_group, float("-inf"), left)
    return tl.where(left == float("-inf"), rank, LOWEST)


@triton.jit
def select_experts_kernel(
    scores,
    stride,
    ids,
    weights,
    bias,
    expert_scales,
    scale,
    COUNT: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    GATING: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ids and weights (tokens, USED) from scores (tokens, stride), as `reference.route`; one program per
    token. BIASED: softmax or sigmoid of the scores plus a bias is what is selected by. SCALED: weights are
    multiplied by `expert_scales`.

    NaN scores count as the lowest. Reads 4·COUNT bytes per token, writes 8·USED.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0)
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    expert = tl.arange(0, PADDED)
    inside = expert < COUNT
    score = tl.load(scores + token * stride + expert, mask=inside, other=LOWEST)
    score = tl.where(inside & (score == score), tl.maximum(score, LOWEST), LOWEST)
    top = tl.max(score, axis=0)
    if GATING == SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        weight = tl.where(inside, tl.exp(score - top), 0.0)
    rank = score
    if BIASED or GROUPS > 1:
        rank = weight if GATING == SIGMOID else weight / tl.sum(weight, axis=0)
    if BIASED:
        rank += tl.load(bias + expert, mask=inside, other=0.0)
    if GROUPS > 1:
        rank = _best_groups(rank, inside, COUNT, GROUPS, GROUPS_PER_TOKEN)
    left = tl.where(inside, rank, float("-inf"))
    for _ in range(EXPERTS_PER_TOKEN):
        best_expert = tl.argmax(left, axis=0)
        left = tl.where(expert == best_expert, float("-inf"), left)
    selected = inside & (left == float("-inf"))
    whole = tl.sum(tl.where(selected, weight, 0.0), axis=0)
    if GATING == SOFTMAX:
        total = tl.sum(weight, axis=0)
        weight = weight / total
        whole = whole / total
    elif GATING == SOFTMAX_OF_SELECTED:
        weight = weight / whole
        whole = whole / whole
    if NORMALIZED:
        weight = weight / tl.maximum(whole, MIN_SUM)
    weight = weight * scale
    if SCALED:
        weight = weight * tl.load(expert_scales + expert, mask=inside, other=0.0)
    left = tl.where(inside, rank, float("-inf"))
    for slot in range(EXPERTS_PER_TOKEN):
        best_expert = tl.argmax(left, axis=0)
        left = tl.where(expert == best_expert, float("-inf"), left)
        tl.store(ids + token * EXPERTS_PER_TOKEN + slot, best_expert)
        tl.store(
            weights + token * EXPERTS_PER_TOKEN + slot,
            tl.sum(tl.where(expert == best_expert, weight, 0.0), axis=0),
        )


@triton.jit
def expert_products_kernel(
    a,
    activations,
    products,
    ids,
    ASSIGNMENTS: tl.constexpr,
    READ: tl.constexpr,
    GEMV: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """products (assignments, RANK) = a of an assignment's expert times its row, which ASSIGNMENTS share, of
    the LoRA adapter of experts; program (16 rows of a, assignment).

    Skips expert ids below 0. Reads RANK rows of a once per assignment, writes 4·RANK bytes.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    program, assignment = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + assignment)
    if expert < 0:
        return
    BLOCKS: tl.constexpr = READ.blocks
    words = READ.planes * BLOCKS
    row = expert * RANK + program * ROWS
    read = activations + assignment // ASSIGNMENTS * words
    value = project(a, load_ahead(a, row, BLOCKS, GEMV, TILE), read, words, row, BLOCKS, GEMV, TILE)
    tl.store(products + assignment * RANK + program * ROWS + tl.arange(0, 16)[None, :], value)


@triton.jit
def _of_assignment(matrix, assignment, TILE: tl.constexpr):
    """The matrix with the products of its LoRA adapter for one assignment."""
    if TILE.rank > 0:
        return matrix[0], matrix[1], matrix[2], matrix[3] + assignment * TILE.rank, matrix[4]
    else:
        return matrix


@triton.jit
def expert_gated_kernel(
    gate,
    up,
    activations,
    hidden,
    gate_bias,
    up_bias,
    ids,
    weights,
    sum_squares,
    EXPERT_ROWS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    GATED: tl.constexpr,
    SOURCE: tl.constexpr,
    GEMV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden = activation(gate·h) · (up·h) of a token's selected expert, or activation(up·h) without a gate;
    program (16 rows, token·USED + slot).

    Skips expert ids below 0, which are on another device. Reads sixteen rows of both matrices once per
    assignment; writes 12 words per 32 hidden values.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    BLOCKS: tl.constexpr = SOURCE.blocks
    program, assignment = tl.program_id(0), tl.program_id(1)
    token = assignment // EXPERTS_PER_TOKEN
    expert = tl.load(ids + assignment)
    if expert < 0:
        return
    row = expert * EXPERT_ROWS + program * ROWS
    words = SOURCE.planes * BLOCKS
    read = activations + token * words
    UP: tl.constexpr = GATED.up
    up = _of_assignment(up, assignment, UP)
    if GATED.has_gate:
        GATE: tl.constexpr = GATED.gate
        gate = _of_assignment(gate, assignment, GATE)
        pair = load_pair_ahead(gate, up, row, BLOCKS, GEMV, GATED)
        gates, ups = project_pair(gate, up, pair, read, words, row, BLOCKS, GEMV, GATED)
    else:
        ups = project(up, load_ahead(up, row, BLOCKS, GEMV, UP), read, words, row, BLOCKS, GEMV, UP)
        gates = ups
    if SOURCE.norm == ROOT_MEAN_SQUARE:
        own = SumSquares(sum_squares.sums + token * SOURCE.programs, sum_squares.epsilon)
        inverse = inverse_norms(own, 1, SOURCE, 1)
        ups, gates = ups * inverse, gates * inverse
    if GATED.is_weighted:
        weight = tl.load(weights + assignment)
        ups, gates = ups * weight, gates * weight
    if GATED.has_bias:
        rows = (row + tl.arange(0, 16))[None, :]
        ups += tl.load(up_bias + rows)
        gates += tl.load(gate_bias + rows)
    if GATED.has_gate:
        value = activate_gated(gates, ups, GATED.activation)
    else:
        value = activate(ups, GATED.activation)
    one = tl.arange(0, 1)
    quantize(value, hidden, program + one, one == 0, HIDDEN, assignment + one)


@triton.jit
def expert_down_kernel(
    down,
    activations,
    y,
    stride,
    bias,
    ids,
    weights,
    shared,
    WIDTH: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    READ: tl.constexpr,
    GEMV: tl.constexpr,
    DOWN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y = Σ weight · (down·hidden + bias), plus the previous y times its weight; program (16 rows, token).

    DOWN.shared SHARED: y holds the shared expert's result; SHARED_AND_WEIGHED: sigmoid(its score) is its
    weight.
    Reads sixteen rows of every selected expert, writes 64 bytes per token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    program, token = tl.program_id(0), tl.program_id(1)
    out = (program * ROWS + tl.arange(0, 16))[None, :]
    target = y + token * stride + out
    total = tl.zeros((1, 16), tl.float32)
    if DOWN.shared != UNSHARED:
        total = tl.load(target)
        if DOWN.shared == SHARED_AND_WEIGHED:
            total = total / (1.0 + tl.exp(-tl.load(shared.scores + token * shared.stride)))
    BLOCKS: tl.constexpr = READ.blocks
    TILE: tl.constexpr = DOWN.tile
    words = READ.planes * BLOCKS
    for slot in range(EXPERTS_PER_TOKEN):
        assignment = token * EXPERTS_PER_TOKEN + slot
        expert = tl.load(ids + assignment)
        if expert >= 0:
            row = expert * WIDTH + program * ROWS
            read = activations + assignment * words
            ahead = load_ahead(down, row, BLOCKS, GEMV, TILE)
            own = _of_assignment(down, assignment, TILE)
            value = project(own, ahead, read, words, row, BLOCKS, GEMV, TILE)
            if DOWN.has_bias:
                value += tl.load(bias + (row + tl.arange(0, 16))[None, :])
            if not DOWN.is_weighted:
                value *= tl.load(weights + assignment)
            total += value
    tl.store(target, total)
