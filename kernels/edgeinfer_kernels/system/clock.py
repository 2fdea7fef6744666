"""The clock of `time.perf_counter` for compiled code: a C function that writes the time."""

import ctypes
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from edgeinfer_kernels.system.waiting import address_of

NANOSECONDS = 1_000_000_000


class NativeClock:
    """A monotonic clock.

    The C function at address `function` writes a time to 16 bytes, whose address is its only argument, or its
    second one after `argument`, if that is not negative. `units`: the seconds of each of the two int64 there.
    """

    def __init__(self) -> None:
        if sys.platform == "win32":
            self._library: object = ctypes.windll.kernel32
            self.function, self.argument = address_of(ctypes.windll.kernel32.QueryPerformanceCounter), -1
            self.units = time.get_clock_info("perf_counter").resolution, 0.0
        else:
            library = ctypes.CDLL(None)
            self._library = library
            self.function, self.argument = address_of(library.clock_gettime), int(time.CLOCK_MONOTONIC)
            self.units = 1.0, 1 / NANOSECONDS

    def seconds(self, times: Sequence[int]) -> list[float]:
        """The seconds between consecutive times, each two of the int64 that the function has written."""
        first, second = self.units
        points = [a * first + b * second for a, b in zip(times[::2], times[1::2], strict=True)]
        return [end - begin for begin, end in pairwise(points)]
