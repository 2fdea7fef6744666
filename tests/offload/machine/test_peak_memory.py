"""The high-water mark of memory."""

from pathlib import Path

import numpy as np

from edgeinfer_offload.machine.peak_memory import own_resident_bytes, peak_resident_bytes, reset_peak


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


def test_where_the_system_does_not_tell_pages_apart_all_resident_memory_counts(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t 5 kB\nRssAnon:\t 3 kB\nRssShmem:\t 1 kB\n")
    assert own_resident_bytes(status) == 4096
    status.write_text("Name:\tpython\n")
    assert own_resident_bytes(status) == own_resident_bytes(tmp_path / "none") > 10 << 20
