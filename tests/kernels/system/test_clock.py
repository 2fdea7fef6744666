"""The clock of compiled code."""

import ctypes
import time

import pytest

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
    measured = clock.seconds(times[:])
    assert len(measured) == 2
    for index, seconds in enumerate(measured):
        assert around[index + 1] - within[index] <= seconds <= within[index + 1] - around[index]


def test_times_of_more_than_a_second_are_subtracted() -> None:
    clock = NativeClock()
    clock.units = 1.0, 1e-9
    assert clock.seconds([7, 999_999_000, 9, 1_000]) == pytest.approx([1.000002])
