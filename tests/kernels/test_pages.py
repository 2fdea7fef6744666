"""Page-aligned memory: zeroed, padded, and with huge pages only where the system has them."""

import mmap

import numpy as np
import pytest

from edgeinfer_kernels.pages import HUGE_PAGE, aligned_zeros, allocate


class WithoutHugePages(mmap.mmap):
    """Memory of a kernel that was built without transparent huge pages."""

    def madvise(self, *arguments: int) -> None:
        raise OSError(22, "Invalid argument")


def test_memory_is_allocated_by_kernels_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    memory = allocate(HUGE_PAGE)
    memory[-1] = 1
    assert memory.nbytes == HUGE_PAGE + 4096


def test_arrays_are_zero_and_begin_a_page() -> None:
    array = aligned_zeros((3, 5), np.float32)
    assert array.shape == (3, 5)
    assert not array.any()
    assert array.ctypes.data % mmap.PAGESIZE == 0
