"""Page-aligned main memory."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
HUGE_PAGE = 2 << 20


def allocate(nbytes: int) -> Bytes:
    """Zeroed, page-aligned bytes, plus 4 KiB padding for kernels that prefetch or complete a group.

    The mapping is private: the default of `mmap` shares memory with forked children, which would overwrite
    each other's data. From the size of a huge page on, huge pages are requested if available.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows has no fork.
        return np.frombuffer(mmap.mmap(-1, nbytes + 4096), np.uint8)
    pages = mmap.mmap(-1, nbytes + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages, as that of a Raspberry Pi
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def aligned_zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """A zeroed array whose first element begins a page."""
    elements = int(np.prod(shape, dtype=np.int64))
    nbytes = elements * np.dtype(dtype).itemsize
    return allocate(nbytes)[:nbytes].view(dtype).reshape(tuple(shape))
