"""The clock of compiled code."""

import ctypes
import time
from itertools import pairwise

from edgeinfer_kernels.system.clock import NativeClock


def test_the_clock_is_that_of_python() -> None:
    clock, times = NativeClock(), (ctypes.c_int64 * 6)()
    has_argument = clock.argument >= 0
    kinds = [ctypes.c_int64] * (1 + has_argument)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(clock.function)
    within, around = list[float](), list[float]()
    for index in range(3):
        at = ctypes.addressof(times) + 16 * index
        before = time.perf_counter()
        function(*([clock.argument] if has_argument else []), at)
        around.append(before)
        within.append(time.perf_counter())
    ticks = [times[index] * clock.multiple + times[index + 1] for index in range(0, 6, 2)]
    for index, (begin, end) in enumerate(pairwise(ticks)):
        seconds = (end - begin) * clock.tick
        assert around[index + 1] - within[index] <= seconds <= within[index + 1] - around[index]
