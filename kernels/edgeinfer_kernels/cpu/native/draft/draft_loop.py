"""The draft loop in one run of a thread pool: embedding, all layers, head, next token, repeated.

No Python runs between two draft tokens. `DraftArgs` lists what a loop reads and writes. Thread 0 selects a
token and prepares the next iteration while the others wait; it processes a few thousand numbers.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.thread_pool import meet_all, next_item, run_schedule
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    lanes_max,
    lanes_sum,
    load_floats,
    maximum,
    multiply,
    positive_lanes,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, load_i64, store_f32, store_i64, trailing_zeros
from edgeinfer_kernels.cpu.native.simd.vector_math import exponential
from edgeinfer_kernels.cpu.runtime.abi import LOGITS_PER_PART, MAX_CANDIDATES
from edgeinfer_kernels.cpu.runtime.block_args import DraftArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import ThreadPoolArgs

LANES = 16
ALL_LANES = (1 << LANES) - 1
LOWEST, HIGHEST = np.float32(-1e30), np.float32(1e30)
"""Logits outside this range are treated as invalid."""
NEARER = np.float32(0.75)
"""Factor by which the range of candidate logits below the largest is reduced if there are too many
candidates.
"""
NEAREST = np.float32(1e-3)

exports = Exports()


@device_function
def exponential_of(value):
    """eˣ of one float32, as in `exponential`."""
    return lanes_max(exponential(splat_f32(value)))


@device_function
def place_steps(step_args, count, start, tokens):
    """Set all calls of a step to `tokens` tokens at positions start…; their RoPE tables have these."""
    for i in range(count):
        rope_args = step_args[i]
        step = rope_args.step
        step.rope = step.rope + (start - step.start) * rope_args.rope_bytes
        step.start = start
        step.tokens = tokens


@device_function
def set_next_token(block, ids):
    """Set the calls for the one token at `ids`, after those that have been evaluated."""
    if block.own != 0:
        last = block.head_step.x
        for i in range(0, block.own_columns, LANES):
            store_floats(block.own + 4 * i, load_floats(last + 4 * i))
    first = block.step_args[0].step
    place_steps(block.step_args, block.step_arg_count, first.start + first.tokens, 1)
    for i in range(block.step_arg_count):
        step = block.step_args[i].step
        step.pending = 0
        step.source = step.target
    block.head_step.x = block.x
    block.embed.ids = ids


@device_function
def best_of(logits, end, part):
    """Fill a LogitsPart from `end` logits, a whole number of lanes."""
    largest = load_floats(logits)
    for i in range(LANES, end, LANES):
        largest = maximum(largest, load_floats(logits + 4 * i))
    top = lanes_max(largest)
    index = 0
    is_found = False
    total = splat_f32(np.float32(0))
    for i in range(0, end, LANES):
        below = subtract(splat_f32(top), load_floats(logits + 4 * i))
        if not is_found:
            equal = ALL_LANES ^ positive_lanes(below)
            if equal != 0:
                index = i + trailing_zeros(equal)
                is_found = True
        total = add(total, exponential(subtract(splat_f32(np.float32(0)), below)))
    part.top = top
    part.total = lanes_sum(total)
    part.index = index


@device_function
def reduce_parts(pool, counter, block):
    """Phase: scale the logits and run `best_of` on every part. Logits of tokens that may not be drafted are
    set below all others.
    """
    id_limit = block.id_limit
    scale = block.logit_scale
    logits = block.logits
    while True:
        item = next_item(pool, counter)
        first = item * LOGITS_PER_PART
        if first >= id_limit:
            break
        count = min(LOGITS_PER_PART, id_limit - first)
        end = (count + LANES - 1) // LANES * LANES
        at = logits + 4 * first
        for i in range(count, end):
            store_f32(at + 4 * i, LOWEST)
        if scale != np.float32(1):
            for i in range(0, end, LANES):
                store_floats(at + 4 * i, multiply(load_floats(at + 4 * i), splat_f32(scale)))
        best_of(at, end, block.parts[item])


@device_function
def best_of_parts(block):
    """(logit, token, softmax) of the argmax token, the first of equals."""
    parts = block.parts
    count = (block.id_limit + LOGITS_PER_PART - 1) // LOGITS_PER_PART
    top = parts.top
    token = parts.index
    for i in range(1, count):
        part_top = parts[i].top
        if part_top > top:
            top = part_top
            token = LOGITS_PER_PART * i + parts[i].index
    total = np.float32(0)
    for i in range(count):
        part = parts[i]
        total += part.total * exponential_of(part.top - top)
    return top, token, np.float32(1) / total


@device_function
def gather(block, min_logit, ids, weights):
    """Store tokens whose logit is at least `min_logit` in `ids`, ascending, and their logits in `weights`;
    return their number, or MAX_CANDIDATES + 1 if there are more.
    """
    parts = block.parts
    id_limit = block.id_limit
    logits = block.logits
    count = 0
    for part in range((id_limit + LOGITS_PER_PART - 1) // LOGITS_PER_PART):
        if parts[part].top < min_logit:
            continue
        for i in range(part * LOGITS_PER_PART, min(id_limit, (part + 1) * LOGITS_PER_PART), LANES):
            taken = ALL_LANES ^ positive_lanes(subtract(splat_f32(min_logit), load_floats(logits + 4 * i)))
            while taken != 0:
                token = i + trailing_zeros(taken)
                taken &= taken - 1
                if token < id_limit:
                    if count == MAX_CANDIDATES:
                        return count + 1
                    store_i64(ids + 8 * count, token)
                    store_f32(weights + 4 * count, load_f32(logits + 4 * token))
                    count += 1
    return count


@device_function
def logit_threshold(block, top, weights, count, sorted_logits):
    """The smallest of `count` logits that passes top-k and then top-p."""
    for i in range(count):
        value = load_f32(weights + 4 * i)
        slot = i
        while slot > 0 and load_f32(sorted_logits + 4 * (slot - 1)) < value:
            store_f32(sorted_logits + 4 * slot, load_f32(sorted_logits + 4 * (slot - 1)))
            slot -= 1
        store_f32(sorted_logits + 4 * slot, value)
    top_k = block.top_k
    top_count = min(count, top_k) if top_k > 0 else count
    total = np.float32(0)
    for i in range(top_count):
        total += exponential_of(load_f32(sorted_logits + 4 * i) - top)
    target_sum = block.top_p * total
    reached = np.float32(0)
    last = 0
    for i in range(top_count):
        if reached < target_sum:
            reached += exponential_of(load_f32(sorted_logits + 4 * i) - top)
            last = i
    return load_f32(sorted_logits + 4 * last)


@device_function
def candidates(block, top, step):
    """The candidates of a draft token and their weights e^((logit - best)/temperature); (count, sum of
    weights).
    """
    ids = block.candidates + 8 * MAX_CANDIDATES * step
    weights = block.weights + 4 * MAX_CANDIDATES * step
    reach = block.reach
    count = gather(block, top - reach, ids, weights)
    while count > MAX_CANDIDATES and reach > NEAREST:
        reach *= NEARER
        count = gather(block, top - reach, ids, weights)
    count = min(count, MAX_CANDIDATES)
    min_logit = logit_threshold(block, top, weights, count, block.sorted_logits)
    temperature = block.temperature
    passed = 0
    total = np.float32(0)
    for i in range(count):
        logit = load_f32(weights + 4 * i)
        if logit >= min_logit:
            weight = exponential_of((logit - top) / temperature)
            store_i64(ids + 8 * passed, load_i64(ids + 8 * i))
            store_f32(weights + 4 * passed, weight)
            total += weight
            passed += 1
    return passed, total


@device_function
def sample_candidate(block, step, count, total):
    """(token, weight): one of the candidates, sampled with the given uniform number."""
    ids = block.candidates + 8 * MAX_CANDIDATES * step
    weights = block.weights + 4 * MAX_CANDIDATES * step
    target_sum = load_f32(block.uniforms + 4 * step) * total
    slot = 0
    reached = load_f32(weights)
    while slot < count - 1 and reached <= target_sum:
        slot += 1
        reached += load_f32(weights + 4 * slot)
    return load_i64(ids + 8 * slot), load_f32(weights + 4 * slot)


@device_function
def add_draft_token(block, step):
    """Sample the next token and prepare the next iteration, or end the loop."""
    top, token, prob = best_of_parts(block)
    block.is_running = 0
    block.forwards = step + 1
    if not (LOWEST < top < HIGHEST and prob > np.float32(0)):  # A NaN among the logits propagates to the sum.
        return
    if block.temperature > np.float32(0):
        count, total = candidates(block, top, step)
        store_i64(block.candidate_counts + 8 * step, count)
        if count > 1:
            prob = np.float32(1) / total
        if block.uniforms != 0:
            token, weight = sample_candidate(block, step, count, total)
            if count > 1:
                prob = weight / total
    reached = block.reached * prob
    block.reached = reached
    if reached < load_f32(block.min_probs + 4 * step):
        return
    ids = block.ids + 8 * step
    if block.row_ids != 0:
        token = load_i64(block.row_ids + 8 * token)
    store_i64(ids, token)
    store_f32(block.probs + 4 * step, prob)
    block.count = step + 1
    is_profitable = reached >= load_f32(block.min_probs_to_continue + 4 * step)
    if is_profitable and step + 1 < block.max_tokens:
        set_next_token(block, ids)
        block.is_running = 1


@device_function
def run_draft_loop(block, pool, thread):
    """As `draft_tokens`; afterwards all threads see its outputs."""
    step = 0
    running = block.is_running
    while running != 0:
        run_schedule(block.schedule, block.steps, pool, thread)
        meet_all(pool, thread, True, 0, 0)
        reduce_parts(pool, 0, block)
        meet_all(pool, thread, True, 0, 0)
        if thread == 0:
            add_draft_token(block, step)
        meet_all(pool, thread, True, 0, 0)
        running = block.is_running
        step += 1


@exports.add("draft_tokens", DraftArgs, int, ThreadPoolArgs, int)
def draft_tokens(block, step_args, pool, thread):
    """Evaluate the given tokens, then draft and evaluate further ones: `max_tokens` tokens, or fewer if
    the next is not likely enough to be accepted.

    Reads the weights of all layers and of the head once per draft token.
    """
    run_draft_loop(block, pool, thread)
