"""The clock of `time.perf_counter` for compiled code: a C function that writes the time."""

import ctypes
import sys
import time

from edgeinfer_kernels.system.waiting import address_of

NANOSECONDS = 1_000_000_000


class NativeClock:
    """A monotonic clock.

    The C function at address `function` writes a time to 16 bytes, whose address is its only argument, or its
    second one after `argument`, if that is not negative. Of the two int64 there the first one counts
    `multiple` ticks and the second one 1 or, if the function doesn't write it, nothing. `tick`: the seconds.
    """

    def __init__(self) -> None:
        if sys.platform == "win32":
            self._library: object = ctypes.windll.kernel32
            self.function, self.argument = address_of(ctypes.windll.kernel32.QueryPerformanceCounter), -1
            self.multiple, self.tick = 1, time.get_clock_info("perf_counter").resolution
        else:
            library = ctypes.CDLL(None)
            self._library = library
            self.function, self.argument = address_of(library.clock_gettime), int(time.CLOCK_MONOTONIC)
            self.multiple, self.tick = NANOSECONDS, 1 / NANOSECONDS
