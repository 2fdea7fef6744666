"""The thread pool: threads that run one function together, barriers, and sleep.

`ThreadPoolArgs` lists the fields of a pool. `pool_run` starts a function on all threads and works as
thread 0 itself. `run_schedule` executes a whole list of functions in one such run on all threads. Waiting
threads first spin, then yield to other programs (`yield_function`). A thread that still waits, at a barrier
or for work, sleeps in the OS kernel, where it uses no CPU time: until a word of memory changes, where the
system has a call for it, else in short sleeps. No Python code runs here, so a Ctrl-C cannot interrupt it.
"""

from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_pointer_0,
    call_pointer_1,
    call_pointer_4,
    call_pointer_6,
    load_i64,
    prefetch,
    spin_pause,
    store_i64,
    wait_on_address,
)
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, STEP_TOKENS, WAIT_KINDS, WORK_COUNTERS
from edgeinfer_kernels.cpu.runtime.kernel_args import ScheduleStep, ThreadPoolArgs

SPINS_BEFORE_YIELD = 500
"""Longer than most waits at a barrier. Longer spinning would keep the awaited thread off this CPU: with other
programs busy, 4000 spins decoded at half the speed of 1000 and fewer.
"""
YIELDS_BEFORE_SLEEP = 500
"""Longer than the Python code between two tokens."""
FUTEX, WINDOWS, MACOS = WAIT_KINDS["futex"], WAIT_KINDS["windows"], WAIT_KINDS["macos"]
WORD_BYTES = 8
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # for this process only

exports = Exports()


@device_function
def wait_a_little(pool, spins):
    """One iteration of a wait loop."""
    if spins > SPINS_BEFORE_YIELD:
        call_pointer_0(pool.yield_function)
    else:
        spin_pause()


@device_function
def sleep_until_change(pool, word, seen, sleeping):
    """Sleep until `word` is no longer `seen`, or for a short time; `sleeping` counts the sleeping threads."""
    kind = pool.wait_kind
    atomic_add(sleeping, 1)
    if kind == FUTEX:
        call_pointer_6(pool.wait_function, pool.futex, word, FUTEX_WAIT, seen, 0, 0)
    elif kind == WINDOWS:
        wait_on_address(pool.wait_function, word, seen)
    elif kind == MACOS:
        call_pointer_4(pool.wait_function, word, seen, WORD_BYTES, 0)
    elif atomic_load(word) == seen:
        call_pointer_1(pool.sleep_function, pool.sleep_argument)
    atomic_add(sleeping, -1)


@device_function
def wake(pool, word, sleeping):
    """Wake the threads that sleep until `word` changes."""
    kind = pool.wait_kind
    if kind == 0 or atomic_load(sleeping) == 0:
        return
    if kind == FUTEX:
        call_pointer_6(pool.wake_function, pool.futex, word, FUTEX_WAKE, 1 << 30, 0, 0)
    else:  # macOS also takes a size and flags
        call_pointer_4(pool.wake_function, word, WORD_BYTES, 0, 0)


@device_function
def clear_counters(pool):
    """Set the work counters to 0. Those that are 0 aren't written: their cache lines stay shared."""
    for counter in range(WORK_COUNTERS):
        at = pool.counters + CACHE_LINE * counter
        if load_i64(at) != 0:
            store_i64(at, 0)


@device_function
def await_change(pool, word, seen, sleeping, ahead, end):
    """Return when `word` is no longer `seen`, and prefetch the memory from `ahead` to `end` until then;
    returns the next address to prefetch. `sleeping` counts the threads that sleep until it changes.
    """
    spins = 0
    while atomic_load(word) == seen:
        if ahead < end:
            prefetch(ahead)
            ahead += CACHE_LINE
        elif spins < SPINS_BEFORE_YIELD or pool.wait_kind == 0:
            spins += 1
            wait_a_little(pool, spins)
        else:
            sleep_until_change(pool, word, seen, sleeping)
    return ahead


@device_function
def have_arrived(pool, completed):
    """Whether every thread is at the barrier after `completed` ones, or past it."""
    for thread in range(pool.threads):
        if atomic_load(pool.arrivals + CACHE_LINE * thread) == completed:
            return False
    return True


@device_function
def end_barrier(pool, completed, clear):
    """End the barrier after `completed` ones, at which all threads are, unless another thread does."""
    if atomic_replace(pool.ended, completed, completed + 1) != 0:
        if clear:
            clear_counters(pool)
        atomic_store(pool.barrier, completed + 1)
        wake(pool, pool.barrier, pool.barrier_sleeping)


@device_function
def meet_all(pool, thread, clear, ahead, end):
    """Return when every thread of the pool has called this; the counters are 0 then if `clear`.

    A waiting thread prefetches the memory from `ahead` to `end`; returns the next address to prefetch. Each
    thread writes to a separate cache line, and only the first one reads them: on 16 cores, adding to one word
    took longer than all else. If the first one sleeps, the last one to arrive doesn't wait until it is awake.
    """
    completed = atomic_load(pool.barrier)
    own = pool.arrivals + CACHE_LINE * thread
    atomic_store(own, completed + 1)
    if thread == 0:
        for other in range(1, pool.threads):
            word = pool.arrivals + CACHE_LINE * other
            ahead = await_change(pool, word, completed, pool.first_sleeping, ahead, end)
        end_barrier(pool, completed, clear)
    elif atomic_load(pool.first_sleeping) != 0:
        if have_arrived(pool, completed):
            end_barrier(pool, completed, clear)
        wake(pool, own, pool.first_sleeping)
    return await_change(pool, pool.barrier, completed, pool.barrier_sleeping, ahead, end)


@device_function
def barrier(pool, thread):
    """Return when every thread of the pool has called this."""
    barrier_prefetching(pool, thread, 0, 0)


@device_function
def barrier_prefetching(pool, thread, ahead, end):
    """As `barrier`; a waiting thread prefetches the memory from `ahead` to `end`. Returns the next address to
    prefetch.
    """
    if pool.threads != 1:
        return meet_all(pool, thread, False, ahead, end)
    return ahead


@device_function
def barrier_and_clear(pool, thread):
    """As `barrier`; afterwards the work counters are 0."""
    if pool.threads != 1:
        meet_all(pool, thread, True, 0, 0)
    else:
        clear_counters(pool)


@device_function
def next_token(pool, counter, tokens, token):
    """The token, or other item, that a thread processes after `token`; its first one is its thread index.

    In a short step, the same thread always processes the same tokens, so phases that work on one token each
    need no barrier in between. Its items take less time than counting them on many threads.
    """
    if tokens <= STEP_TOKENS:
        return token + pool.threads
    return pool.threads + next_item(pool, counter)


@device_function
def next_item(pool, counter):
    """Take the next work item of a phase: 0, 1, 2, …; each phase of a block has a separate counter."""
    return atomic_add(pool.counters + CACHE_LINE * counter, 1)


@device_function
def take_part(pool, thread):
    call_pointer_4(pool.function, pool.block, pool.step, pool.address, thread)
    barrier(pool, thread)


@exports.add("pool_run", ThreadPoolArgs, int, int, int)
def pool_run(pool, function, block, step):
    """Run `function(block, step, pool, thread)` on all threads; return when all are done."""
    clear_counters(pool)
    pool.function = function
    pool.block = block
    pool.step = step
    atomic_add(pool.generation, 1)
    wake(pool, pool.generation, pool.sleeping)
    take_part(pool, 0)


@exports.add("run_schedule", ScheduleStep, int, ThreadPoolArgs, int)
def run_schedule(schedule, count, pool, thread):
    """Run the functions of a schedule in order; `count` points to their number.

    The work counters start at 0 for each function, as in a separate run. Without a barrier after a function,
    it leaves the counters at 0 and ends token by token (see `next_token`), as the next function starts. The
    last one needs none either.
    """
    for index in range(load_i64(count)):
        each = schedule[index]
        call_pointer_4(each.function, each.block, each.step, pool.address, thread)
        if each.has_barrier != 0:
            meet_all(pool, thread, True, 0, 0)


@exports.add("pool_shutdown", ThreadPoolArgs)
def pool_shutdown(pool):
    """Shut down: let every thread return from `pool_serve`."""
    atomic_store(pool.generation, -1)
    wake(pool, pool.generation, pool.sleeping)


@exports.add("pool_serve", ThreadPoolArgs, int, int)
def pool_serve(pool, thread, seen):
    """The main loop of a thread: take part in every run after generation `seen`, until shutdown."""
    spins = 0
    while True:
        generation = atomic_load(pool.generation)
        if generation < 0:
            return
        if generation != seen:
            seen = generation
            take_part(pool, thread)
            spins = 0
        elif spins < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP:
            spins += 1
            wait_a_little(pool, spins)
        else:
            sleep_until_change(pool, pool.generation, seen, pool.sleeping)
