"""Runs the CPU stages for a device: a schedule whose steps wait for their stage, process the exchange buffer,
and signal completion.

All threads of the pool poll the exchange buffer, because sleeping in the OS kernel would cost more than a
layer. While they wait, they read the first weights of the next step into their caches.
"""

from edgeinfer_kernels.cpu.native.blocks.thread_pool import meet_all
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import (
    atomic_load,
    atomic_store,
    call_pointer_0,
    call_pointer_4,
    load_i64,
    prefetch,
    spin_pause,
)
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, RANGE_BYTES
from edgeinfer_kernels.cpu.runtime.kernel_args import ServedStep, ServiceArgs, ThreadPoolArgs

SPINS_BEFORE_YIELD = 2000
"""About 50 to 100 us: the duration of attention on most devices."""
LINES_PER_POLL = 4
"""A line takes 5 to 10 ns: a thread sees the device's stage that much later."""
MAX_SPINS = 1 << 28
"""One to two minutes: a device that has not answered by then has failed."""

exports = Exports()


@device_function
def await_stage(pool, words, each, thread):
    """Wait until the device has reached the stage of a step, or a timeout; after a timeout the steps run on
    the current content, because threads that leave would block the others.
    """
    spins, stage = 0, each.awaited
    following, left = each.ahead, each.ranges
    at, end = following, following
    while atomic_load(words.sent) < stage and atomic_load(words.given_up) == 0:
        if at < end:
            for line in range(LINES_PER_POLL):
                prefetch(at + CACHE_LINE * line)
            at += CACHE_LINE * LINES_PER_POLL
            continue
        if left != 0:
            at = load_i64(following) + thread * load_i64(following + 8)
            end = at + load_i64(following + 16)
            following += RANGE_BYTES
            left -= 1
            continue
        spins += 1
        if spins > MAX_SPINS:
            atomic_store(words.given_up, 1)
        elif spins > SPINS_BEFORE_YIELD:
            call_pointer_0(pool.yield_function)
        else:
            spin_pause()


@exports.add("serve_device", ServedStep, ServiceArgs, ThreadPoolArgs, int)
def serve_device(schedule, service, pool, thread):
    """Run the steps of a schedule, each when the device has reached its stage."""
    words = service.words
    for index in range(service.steps):
        each = schedule[index]
        awaited = each.awaited
        if awaited != 0:
            await_stage(pool, words, each, thread)
        call_pointer_4(each.function, each.block, each.step, pool.address, thread)
        meet_all(pool, True, 0, 0)
        completed = each.completed
        if completed != 0 and thread == 0:
            atomic_store(words.answered, completed)
