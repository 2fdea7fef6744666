"""The high-water mark of memory."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_offload.machine.peak_memory import own_resident_bytes, peak_resident_bytes, reset_peak

ON_WINE = sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


@pytest.mark.skipif(ON_WINE, reason="Wine reports no peaks")
def test_the_peak_includes_freed_memory() -> None:
    reset_peak()
    before = peak_resident_bytes()
    taken = np.ones(128 << 20, np.uint8)
    del taken
    assert peak_resident_bytes() > before + (100 << 20)


def test_after_a_reset_the_peak_is_the_current_use() -> None:
    taken = np.ones(128 << 20, np.uint8)
    high = peak_resident_bytes()
    del taken
    if reset_peak():
        assert peak_resident_bytes() < high - (100 << 20)


def test_without_page_kinds_all_resident_memory_counts(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t 5 kB\nRssAnon:\t 3 kB\nRssShmem:\t 1 kB\n")
    assert own_resident_bytes(status) == 4096
    status.write_text("Name:\tpython\n")
    assert own_resident_bytes(status) == own_resident_bytes(tmp_path / "none") > 10 << 20
