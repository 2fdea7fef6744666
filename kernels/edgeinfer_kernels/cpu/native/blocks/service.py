"""Runs the CPU stages for a device: a schedule whose steps wait for their stage, process the exchange buffer,
and signal completion.

All threads of the pool poll the exchange buffer, because sleeping in the OS kernel would cost more than a
layer.
"""

from edgeinfer_kernels.cpu.native.blocks.thread_pool import meet_all
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import (
    atomic_load,
    atomic_store,
    call_pointer_0,
    call_pointer_4,
    spin_pause,
)
from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.kernel_args import ServedStep, ServiceArgs, ThreadPoolArgs

SPINS_BEFORE_YIELD = 2000
"""About 50 to 100 us: the duration of attention on most devices."""
MAX_SPINS = 1 << 28
"""One to two minutes: a device that has not answered by then has failed."""

exports = Exports()


@device_function
def await_stage(pool, words, stage):
    """Wait until the device has reached `stage`, or a timeout; after a timeout the steps run on the current
    content, because threads that leave would block the others.
    """
    spins = 0
    while atomic_load(words.sent) < stage and atomic_load(words.given_up) == 0:
        spins += 1
        if spins > MAX_SPINS:
            atomic_store(words.given_up, 1)
        elif spins > SPINS_BEFORE_YIELD:
            call_pointer_0(pool.yield_function)
        else:
            spin_pause()


@exports.add("serve_device", ServedStep, ServiceArgs, ThreadPoolArgs, int)
def serve_device(schedule, service, pool, thread):
    """Run the steps of a schedule, each when the device has reached its stage.

    As in `run_schedule`, no barrier follows a step that ends token by token. At the end of a stage x is
    complete after a barrier, or on the first thread, if that has the only token.
    """
    words = service.words
    for index in range(service.steps):
        each = schedule[index]
        awaited = each.awaited
        if awaited != 0:
            await_stage(pool, words, awaited)
        step_args = each.step
        call_pointer_4(each.function, each.block, step_args.address, pool.address, thread)
        completed = each.completed
        if each.has_barrier != 0 or step_args.tokens > (1 if completed != 0 else STEP_TOKENS):
            meet_all(pool, thread, True, 0, 0)
        if completed != 0 and thread == 0:
            atomic_store(words.answered, completed)
