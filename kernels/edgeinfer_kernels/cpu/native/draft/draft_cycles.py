"""Several drafts of a head and the steps of its target that verify them, in one run of a thread pool.

No Python runs between two of them. After a step thread 0 compares its tokens with those of the draft, and
prepares the next draft: the head reads the right tokens and the one after them, with their hidden states.
`DraftCyclesArgs` lists what a run reads and writes.
"""

from edgeinfer_kernels.cpu.native.blocks.phases import normalize
from edgeinfer_kernels.cpu.native.blocks.thread_pool import meet_all, run_schedule
from edgeinfer_kernels.cpu.native.draft.draft_loop import place_steps, run_draft_loop
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import (
    call_pointer_1,
    call_pointer_2,
    load_f32,
    load_i64,
    store_f32,
    store_i64,
)
from edgeinfer_kernels.cpu.runtime.embedding_args import DraftCyclesArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import ThreadPoolArgs

exports = Exports()


@device_function
def write_time(block, index):
    """Write the time in ticks of the clock."""
    if block.clock_id < 0:
        call_pointer_1(block.clock_function, block.clock_time)
    else:
        call_pointer_2(block.clock_function, block.clock_id, block.clock_time)
    first = load_i64(block.clock_time)
    store_i64(block.times + 8 * index, first * block.clock_multiple + load_i64(block.clock_time + 8))


@device_function
def copy_ids(source, target, count):
    for i in range(count):
        store_i64(target + 8 * i, load_i64(source + 8 * i))


@device_function
def begin_step(block):
    """Set the target's calls for the last token of the text and the draft after it."""
    target = block.target
    count = block.draft.count
    copy_ids(block.draft.ids, target.ids + 8, count)
    place_steps(target.step_args, target.step_arg_count, block.start, 1 + count)
    target.head_step.tokens = 1 + count


@device_function
def ends_text(block, token):
    """Whether a token ends the completion."""
    is_end = False
    for i in range(block.end_count):
        is_end = is_end or load_i64(block.end_ids + 8 * i) == token
    return is_end


@device_function
def produced_tokens(block):
    """The number of tokens that the step found after the text: the right ones of the draft, up to one that
    ends it, and the one after them; 0: a logit isn't finite.
    """
    best = block.target.best
    count = block.draft.count
    for row in range(1 + count):
        if load_i64(best + 8 * row) < 0:
            return 0
    right = 0
    while right < count:
        token = load_i64(best + 8 * right)
        if token != load_i64(block.draft.ids + 8 * right) or ends_text(block, token):
            break
        right += 1
    return 1 + right


@device_function
def keep_cycle(block, produced):
    """Write what the cycle has found, and the target's states of the tokens that are kept."""
    draft = block.draft
    target = block.target
    count = draft.count
    drafted = block.drafted_count
    found = block.found_count
    store_i64(block.draft_lengths + 8 * block.cycles, count)
    store_i64(block.step_lengths + 8 * block.cycles, produced)
    copy_ids(draft.ids, block.drafted + 8 * drafted, count)
    copy_ids(target.best, block.found + 8 * found, produced)
    for i in range(count):
        store_f32(block.probs + 4 * (drafted + i), load_f32(draft.probs + 4 * i))
    block.drafted_count = drafted + count
    block.found_count = found + produced
    for row in range(produced):
        out = block.states + row * block.states_stride
        normalize(target.norm, target.x + row * target.x_stride, out)


@device_function
def begin_draft(block, produced):
    """Set the head's calls for the tokens that the step has found, whose states are at `states`."""
    draft = block.draft
    target = block.target
    start = block.head_start + block.given_count
    block.head_start = start
    block.given_count = produced
    copy_ids(target.best, block.given, produced)
    store_i64(target.ids, load_i64(target.best + 8 * (produced - 1)))
    place_steps(draft.step_args, draft.step_arg_count, start, produced)
    draft.embed.ids = block.given
    draft.head_step.x = draft.x + (produced - 1) * block.head_stride
    block.input.states = block.states
    block.input.start = start
    draft.max_tokens = min(block.longest, block.limit)
    draft.count = 0
    draft.is_running = 1
    draft.reached = 1.0


@device_function
def end_cycle(block):
    """Compare the step with the draft, and prepare the next cycle, or end the run."""
    produced = produced_tokens(block)
    block.is_running = 0
    if produced == 0:
        return
    keep_cycle(block, produced)
    cycles = block.cycles + 1
    block.cycles = cycles
    block.start = block.start + produced
    block.limit = block.limit - produced
    is_last = ends_text(block, load_i64(block.target.best + 8 * (produced - 1)))
    if cycles < block.max_cycles and block.limit > 0 and not is_last:
        begin_draft(block, produced)
        block.states = block.states + produced * block.states_stride
        block.is_running = 1


@exports.add("draft_cycles", DraftCyclesArgs, int, ThreadPoolArgs, int)
def draft_cycles(block, step_args, pool, thread):
    """Draft and verify until `max_cycles` drafts are verified, the completion ends, or a logit isn't finite.

    Reads the weights of the head once per draft token, and those of the target once per cycle.
    """
    running = block.is_running
    if thread == 0:
        write_time(block, 0)
    while running != 0:
        run_draft_loop(block.draft, pool, thread)
        if thread == 0:
            write_time(block, 2 * block.cycles + 1)
            begin_step(block)
        meet_all(pool, thread, True, 0, 0)
        run_schedule(block.target.schedule, block.target.steps, pool, thread)
        meet_all(pool, thread, True, 0, 0)
        if thread == 0:
            at = 2 * block.cycles + 2
            end_cycle(block)
            write_time(block, at)
        meet_all(pool, thread, True, 0, 0)
        running = block.is_running
