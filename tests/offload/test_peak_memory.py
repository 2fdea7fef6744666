"""The high-water mark of memory."""

import numpy as np

from edgeinfer_offload.peak_memory import peak_resident_bytes, reset_peak


def test_the_peak_remembers_memory_that_was_given_back() -> None:
    reset_peak()
    before = peak_resident_bytes()
    taken = np.ones(128 << 20, np.uint8)
    del taken
    assert peak_resident_bytes() > before + (100 << 20)


def test_after_a_reset_the_peak_is_what_is_held_now() -> None:
    taken = np.ones(128 << 20, np.uint8)
    high = peak_resident_bytes()
    del taken
    if reset_peak():
        assert peak_resident_bytes() < high - (100 << 20)
