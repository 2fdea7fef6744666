"""The thread pool: threads that run one function together, barriers, and sleep.

`ThreadPoolArgs` lists the fields of a pool. `team_run` starts a function on all threads and works as
thread 0 itself. `run_program` executes a whole list of functions in one such run on all threads. Waiting
threads first spin, then yield to other programs (`yield_function`). A thread that still waits, at a barrier
or for work, sleeps in the OS kernel, where it uses no CPU time: on a futex if available, else in short
sleeps. No Python code runs here, so a Ctrl-C cannot interrupt it.
"""

from edgeinfer_kernels.cpu.native.simd.exports import Exports, inner
from edgeinfer_kernels.cpu.native.simd.scalars import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_pointer_0,
    call_pointer_1,
    call_pointer_4,
    call_pointer_6,
    load_i64,
    prefetch,
    spin_pause,
    store_i64,
)
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, STEP_TOKENS, WORK_COUNTERS
from edgeinfer_kernels.cpu.runtime.kernel_args import ScheduleStep, ThreadPoolArgs

SPINS_BEFORE_YIELD = 500
"""Longer than most waits at a barrier. Longer spinning would keep the awaited thread off this CPU: with other
programs busy, 4000 spins decoded at half the speed of 1000 and fewer.
"""
YIELDS_BEFORE_REST = 500
"""Longer than the Python code between two tokens."""
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # for this process only

exports = Exports()


@inner
def wait_a_little(team, spins):
    """One iteration of a wait loop."""
    if spins > SPINS_BEFORE_YIELD:
        call_pointer_0(team.yield_function)
    else:
        spin_pause()


@inner
def rest(team, word, seen, resting):
    """Sleep until `word` is no longer `seen`, or for a short time; `resting` counts the sleeping threads."""
    futex = team.futex
    atomic_add(resting, 1)
    if futex != 0:
        call_pointer_6(team.syscall_function, futex, word, FUTEX_WAIT, seen, 0, 0)
    elif atomic_load(word) == seen:
        call_pointer_1(team.sleep_function, team.sleep_argument)
    atomic_add(resting, -1)


@inner
def wake(team, word, resting):
    """Wake the threads that sleep until `word` changes."""
    futex = team.futex
    if futex != 0 and atomic_load(resting) != 0:
        call_pointer_6(team.syscall_function, futex, word, FUTEX_WAKE, 1 << 30, 0, 0)


@inner
def clear_counters(team):
    for counter in range(WORK_COUNTERS):
        store_i64(team.counters + CACHE_LINE * counter, 0)


@inner
def meet(team, clear, ahead, end):
    """Return when every thread of the pool has called this; the last one clears the counters if `clear`.

    A waiting thread prefetches the memory from `ahead` to `end`; returns the next address to prefetch.
    """
    threads = team.threads
    turn = atomic_load(team.barrier)
    if atomic_add(team.arrived, 1) == threads - 1:
        if clear:
            clear_counters(team)
        atomic_store(team.arrived, 0)
        atomic_store(team.barrier, turn + 1)
        wake(team, team.barrier, team.barrier_resting)
        return ahead
    spins = 0
    while atomic_load(team.barrier) == turn:
        if ahead < end:
            prefetch(ahead)
            ahead += CACHE_LINE
        elif spins < SPINS_BEFORE_YIELD or team.futex == 0:
            spins += 1
            wait_a_little(team, spins)
        else:
            rest(team, team.barrier, turn, team.barrier_resting)
    return ahead


@inner
def barrier(team):
    """Return when every thread of the pool has called this."""
    barrier_asking(team, 0, 0)


@inner
def barrier_asking(team, ahead, end):
    """As `barrier`; a waiting thread prefetches the memory from `ahead` to `end`. Returns the next address to
    prefetch.
    """
    if team.threads != 1:
        return meet(team, False, ahead, end)
    return ahead


@inner
def barrier_between(team):
    """As `barrier`; afterwards the work counters are 0."""
    if team.threads != 1:
        meet(team, True, 0, 0)
    else:
        clear_counters(team)


@inner
def next_token(team, counter, tokens, token):
    """The token that a thread processes after `token`; its first one is its thread index.

    In a short step, the same thread always processes the same tokens, so phases that work on one token each
    need no barrier in between.
    """
    if tokens <= STEP_TOKENS:
        return token + team.threads
    return team.threads + next_item(team, counter)


@inner
def next_item(team, counter):
    """Take the next work item of a phase: 0, 1, 2, …; each phase of a block has a separate counter."""
    return atomic_add(team.counters + CACHE_LINE * counter, 1)


@inner
def take_part(team, thread):
    call_pointer_4(team.function, team.block, team.step, team.address, thread)
    barrier(team)


@exports.add("team_run", ThreadPoolArgs, int, int, int)
def team_run(team, function, block, step):
    """Run `function(block, step, team, thread)` on all threads; return when all are done."""
    clear_counters(team)
    team.function = function
    team.block = block
    team.step = step
    atomic_add(team.generation, 1)
    wake(team, team.generation, team.resting)
    take_part(team, 0)


@exports.add("run_program", ScheduleStep, int, ThreadPoolArgs, int)
def run_program(schedule, count, team, thread):
    """Run the functions of a schedule in order; `count` points to their number.

    The work counters start at 0 for each function, as in a separate run. Without a barrier after a function,
    it leaves the counters at 0 and ends token by token (see `next_token`), as the next function starts.
    """
    for index in range(load_i64(count)):
        each = schedule[index]
        call_pointer_4(each.function, each.block, each.step, team.address, thread)
        if each.has_barrier != 0:
            meet(team, True, 0, 0)


@exports.add("team_dismiss", ThreadPoolArgs)
def team_dismiss(team):
    """Shut down: let every thread return from `team_serve`."""
    atomic_store(team.generation, -1)
    wake(team, team.generation, team.resting)


@exports.add("team_serve", ThreadPoolArgs, int, int)
def team_serve(team, thread, seen):
    """The main loop of a thread: take part in every run after generation `seen`, until shutdown."""
    spins = 0
    while True:
        generation = atomic_load(team.generation)
        if generation < 0:
            return
        if generation != seen:
            seen = generation
            take_part(team, thread)
            spins = 0
        elif spins < SPINS_BEFORE_YIELD + YIELDS_BEFORE_REST:
            spins += 1
            wait_a_little(team, spins)
        else:
            rest(team, team.generation, seen, team.resting)
