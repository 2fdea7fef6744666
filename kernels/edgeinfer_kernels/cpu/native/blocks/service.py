"""Runs the CPU stages for a device: a schedule whose steps wait for their stage, process the exchange buffer,
and signal completion.

All threads of the pool poll the exchange buffer, because sleeping in the OS kernel would cost more than a
layer.
"""

from edgeinfer_kernels.cpu.native.blocks.thread_pool import meet
from edgeinfer_kernels.cpu.native.simd.exports import Exports, inner
from edgeinfer_kernels.cpu.native.simd.scalars import (
    atomic_load,
    atomic_store,
    call_pointer_0,
    call_pointer_4,
    load_i64,
    spin_pause,
)
from edgeinfer_kernels.cpu.runtime.abi import MAILBOX, SERVED_STEP_BYTES, SERVICE, TEAM

SPINS_BEFORE_YIELD = 2000
"""About 50 to 100 us: the duration of attention on most devices."""
MAX_SPINS = 1 << 28
"""One to two minutes: a device that has not answered by then has failed."""

exports = Exports()


@inner
def await_turn(team, mailbox, turn):
    """Wait until the device has reached `turn`, or a timeout; after a timeout the steps run on the current
    content, because threads that leave would block the others.
    """
    spins = 0
    while atomic_load(mailbox + MAILBOX.sent) < turn and atomic_load(mailbox + MAILBOX.given_up) == 0:
        spins += 1
        if spins > MAX_SPINS:
            atomic_store(mailbox + MAILBOX.given_up, 1)
        elif spins > SPINS_BEFORE_YIELD:
            call_pointer_0(load_i64(team + TEAM.yield_function))
        else:
            spin_pause()


@exports.add("serve_device", 4)
def serve_device(program, service, team, thread):
    """Run the steps of a schedule, each of five int64: (function, block, call, stage awaited, stage
    completed).
    """
    mailbox = load_i64(service + SERVICE.mailbox)
    for step in range(load_i64(service + SERVICE.steps)):
        at = program + SERVED_STEP_BYTES * step
        awaited = load_i64(at + 24)
        if awaited != 0:
            await_turn(team, mailbox, awaited)
        call_pointer_4(load_i64(at), load_i64(at + 8), load_i64(at + 16), team, thread)
        meet(team, True, 0, 0)
        ended = load_i64(at + 32)
        if ended != 0 and thread == 0:
            atomic_store(mailbox + MAILBOX.answered, ended)
