"""A lock file that one program holds at a time; waiting for it is announced, and has an end."""

import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SILENT_SECONDS = 1.5
"""Waiting is announced after so long."""
POLL_SECONDS = 0.05
LOGGER = logging.getLogger("edgeinfer")


class LockTimeoutError(OSError):
    """Another program has held the lock for too long."""


@contextmanager
def file_lock(
    path: Path,
    limit_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the lock at `path` for as long as the context lasts; the system frees that of a program that ends.

    Where there are no locks (Windows, some network drives) nothing is held. A symbolic link is refused.

    Raises:
        LockTimeoutError: another program has held it for `limit_seconds`.
        OSError: the file can't be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        begin, announced = clock(), False
        while not _try_lock(descriptor):
            waited = clock() - begin
            if waited >= limit_seconds:
                raise LockTimeoutError(f"{path}: held by {_holder(descriptor)} for {waited:.0f} s")
            if waited >= SILENT_SECONDS and not announced:
                announced = True
                LOGGER.warning("waiting for %s, which holds %s", _holder(descriptor), path)
            sleep(POLL_SECONDS)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether the file is locked for this program now, or can't be locked at all."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    return True


def _holder(descriptor: int) -> str:
    """The program that wrote its number into the lock file."""
    with suppress(OSError, ValueError):
        number = int(os.pread(descriptor, 32, 0))
        return f"another edgeinfer (process {number}{', which is stopped' if _is_stopped(number) else ''})"
    return "another edgeinfer"


def _is_stopped(process: int) -> bool:
    """Whether a process was stopped, as by Ctrl-Z; False where that can't be told."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        return status.rpartition(")")[2].split()[0] == "T"
    return False
