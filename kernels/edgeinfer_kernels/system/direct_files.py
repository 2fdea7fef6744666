"""Files that are read past the page cache, and the C function that reads them."""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.system.waiting import address_of

PROBE_BYTES = 4096
NO_PREAD = "Windows has no pread"


@dataclass(frozen=True)
class ReadFunction:
    """The address of pread, and its library, which must stay loaded."""

    address: int
    library: object


def can_read_directly() -> bool:
    """Whether the system has pread and preadv; Windows has not."""
    return hasattr(os, "preadv")


def read_function() -> ReadFunction:
    """The C function pread."""
    library = ctypes.CDLL(None)
    return ReadFunction(address_of(library.pread), library)


def read_at(descriptor: int, target: memoryview, offset: int) -> int:
    """Read from `offset` to `target`; returns the number of bytes. Raises OSError."""
    if sys.platform == "win32":
        raise OSError(NO_PREAD)
    return os.preadv(descriptor, [target], offset)


def open_direct(path: Path, sector: int) -> int:
    """The descriptor of a file whose reads of whole sectors bypass the page cache, if the system and the disk
    can do that; else one without read-ahead.

    Raises OSError: it can't be opened.
    """
    if sys.platform == "win32":
        raise OSError(NO_PREAD)
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return _open_buffered(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | direct | os.O_CLOEXEC)
    except OSError:
        return _open_buffered(path)
    if _reads_sectors(descriptor, sector):
        return descriptor
    os.close(descriptor)
    return _open_buffered(path)


def _reads_sectors(descriptor: int, sector: int) -> bool:
    """Whether the disk reads from and to addresses of whole sectors: some need 4 KiB."""
    memory = allocate(2 * PROBE_BYTES).data.cast("B")
    try:
        return read_at(descriptor, memory[sector : 2 * sector], sector) >= 0
    except OSError:
        return False


def _open_buffered(path: Path) -> int:
    if sys.platform == "win32":
        raise OSError(NO_PREAD)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor
