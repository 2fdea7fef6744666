"""Threads that run one function together: start, barrier, rest.

A team lives in a block of int64 (`TEAM` names the fields). `team_run` hands a function to all threads and
works as thread 0 itself. Waiting threads spin; when that has lasted they let other programs run
(`yield_function`); a thread that has had no work for a while rests in the kernel, where it costs nothing: on
a futex of the generation where there is one, else in short sleeps. Nothing of this passes through Python, so
a Ctrl-C can't fall between.
"""

from edgeinfer_kernels.cpu.native.exports import Exports, inner
from edgeinfer_kernels.cpu.native.scalars import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_pointer_0,
    call_pointer_1,
    call_pointer_4,
    call_pointer_6,
    load_i64,
    spin_pause,
    store_i64,
)
from edgeinfer_kernels.cpu.structures import CACHE_LINE, TEAM, WORK_COUNTERS

SPINS_BEFORE_YIELD = 4000
YIELDS_BEFORE_REST = 2000
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # of this process only

exports = Exports()


@inner
def wait_a_little(team, spins):
    """One turn of a waiting loop."""
    if spins > SPINS_BEFORE_YIELD:
        call_pointer_0(load_i64(team + TEAM.yield_function))
    else:
        spin_pause()


@inner
def barrier(team):
    """Return when every thread of the team has called this."""
    threads = load_i64(team + TEAM.threads)
    if threads == 1:
        return
    turn = atomic_load(team + TEAM.barrier)
    if atomic_add(team + TEAM.arrived, 1) == threads - 1:
        atomic_store(team + TEAM.arrived, 0)
        atomic_store(team + TEAM.barrier, turn + 1)
    else:
        spins = 0
        while atomic_load(team + TEAM.barrier) == turn:
            spins += 1
            wait_a_little(team, spins)


@inner
def next_item(team, counter):
    """Take the next piece of work of a phase: 0, 1, 2, …; each phase of a block has its own counter."""
    return atomic_add(team + TEAM.counters + CACHE_LINE * counter, 1)


@inner
def take_part(team, thread):
    function = load_i64(team + TEAM.function)
    call_pointer_4(function, load_i64(team + TEAM.block), load_i64(team + TEAM.call), team, thread)
    barrier(team)


@inner
def rest(team, seen):
    """Sleep until the generation is no longer `seen`, or for a moment."""
    futex = load_i64(team + TEAM.futex)
    atomic_add(team + TEAM.resting, 1)
    if futex != 0:
        word = team + TEAM.generation
        call_pointer_6(load_i64(team + TEAM.syscall_function), futex, word, FUTEX_WAIT, seen, 0, 0)
    elif atomic_load(team + TEAM.generation) == seen:
        call_pointer_1(load_i64(team + TEAM.sleep_function), load_i64(team + TEAM.sleep_argument))
    atomic_add(team + TEAM.resting, -1)


@inner
def wake(team):
    futex = load_i64(team + TEAM.futex)
    if futex != 0 and atomic_load(team + TEAM.resting) != 0:
        word = team + TEAM.generation
        call_pointer_6(load_i64(team + TEAM.syscall_function), futex, word, FUTEX_WAKE, 1 << 30, 0, 0)


@exports.add("team_run", 4)
def team_run(team, function, block, call):
    """Do `function(block, call, team, thread)` on all threads; return when all are done."""
    for counter in range(WORK_COUNTERS):
        store_i64(team + TEAM.counters + CACHE_LINE * counter, 0)
    store_i64(team + TEAM.function, function)
    store_i64(team + TEAM.block, block)
    store_i64(team + TEAM.call, call)
    atomic_add(team + TEAM.generation, 1)
    wake(team)
    take_part(team, 0)


@exports.add("team_dismiss", 1)
def team_dismiss(team):
    """Let every thread return from `team_serve`."""
    atomic_store(team + TEAM.generation, -1)
    wake(team)


@exports.add("team_serve", 3)
def team_serve(team, thread, seen):
    """A thread's life: take part in every run after generation `seen`, until dismissed."""
    spins = 0
    while True:
        generation = atomic_load(team + TEAM.generation)
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
            rest(team, seen)
