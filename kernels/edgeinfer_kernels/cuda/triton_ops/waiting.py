"""Waiting in a kernel for a number that the host, or another stream, raises."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.compile_target import INTERPRETED, USES_PTX

MAX_POLLS = tl.constexpr(1 << 26)
"""One to two minutes: the device stops waiting for a host that has not answered by then."""


@triton.jit
def _poll(number_address):
    """Load the flag with acquire semantics: data written before it is read only afterwards."""
    if INTERPRETED:
        return tl.load(number_address)
    elif not USES_PTX:
        return tl.atomic_add(number_address, 0, sem="acquire", scope="sys")
    else:
        return tl.inline_asm_elementwise(
            "nanosleep.u32 20; ld.acquire.sys.global.u64 $0, [$1];",
            "=l,l",
            [number_address],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def await_number(number_address, number, lost, host_lost):
    """Wait for the flag, with a timeout; afterwards `lost` keeps every later wait short."""
    polls = tl.load(lost).to(tl.int32) * MAX_POLLS
    seen = _poll(number_address)
    while (seen < number) & (polls < MAX_POLLS):
        seen = _poll(number_address)
        polls += 1
    if seen < number:
        tl.store(lost, 1)
        tl.store(host_lost, seen * 0 + 1)
