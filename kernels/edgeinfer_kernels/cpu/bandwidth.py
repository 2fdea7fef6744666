"""Reading memory and nothing else: what decoding can't be faster than."""

import time

import numpy as np

from edgeinfer_kernels.cpu.memory import address, allocate
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cpu.threads import Team


def read_bandwidth(kernels: Kernels, threads: int, nbytes: int = 256 << 20, seconds: float = 0.5) -> float:
    """Bytes per second that `threads` read together from `nbytes` of memory; the best pass of `seconds`."""
    memory = allocate(nbytes)
    memory[:] = 1
    sums = np.zeros(8 * threads, np.int64)
    call = np.array([nbytes, address(sums)], np.int64)
    team = Team(kernels, threads)
    best, end = 0.0, time.perf_counter() + seconds
    try:
        while time.perf_counter() < end:
            begin = time.perf_counter()
            team.run(kernels.address("read_memory"), address(memory), address(call))
            best = max(best, nbytes / (time.perf_counter() - begin))
    finally:
        team.close()
    return best
