"""Locks: a file that one program holds at a time, and thread locks that are released in a forked child."""

import errno
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SILENT_SECONDS = 1.5
"""Waiting is reported after this time."""
POLL_SECONDS = 0.05
LOCKED_BYTE = 0x7FFFFFFF
"""Windows locks bytes, which others then can't read: this one is after the end of the file."""
LOGGER = logging.getLogger("edgeinfer")


class LockTimeoutError(OSError):
    """Another program has held the lock for too long."""


@contextmanager
def file_lock(
    path: Path,
    limit_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    is_removed: bool = False,
) -> Iterator[None]:
    """Hold the lock at `path` during the context; the operating system releases the lock of a program that
    ends. `is_removed`: the file is deleted at the end.

    Without lock support (some network drives) no lock is held. A symbolic link is refused.

    Raises:
        LockTimeoutError: another program has held it for `limit_seconds`.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o600)
    is_held = False
    try:
        begin, announced = clock(), False
        while not (is_held := try_lock(descriptor)):
            waited = clock() - begin
            if waited >= limit_seconds:
                raise LockTimeoutError(f"{path}: held by {_holder(descriptor)} for {waited:.0f} s")
            if waited >= SILENT_SECONDS and not announced:
                announced = True
                LOGGER.warning("waiting for %s, which holds %s", _holder(descriptor), path)
            sleep(POLL_SECONDS)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        # Removed while it is held, so that no other program holds it; Windows deletes no open file.
        if is_removed and is_held and sys.platform != "win32":
            path.unlink(missing_ok=True)
        os.close(descriptor)
        if is_removed and is_held and sys.platform == "win32":
            with suppress(OSError):  # another program has opened it
                path.unlink()


def try_lock(descriptor: int) -> bool:
    """Whether the file is now locked for this program, until it is closed, or locks are not supported."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:  # Wine gives no number for a locked byte
            return error.errno == errno.EINVAL
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    return True


def _holder(descriptor: int) -> str:
    """The program whose process id is in the lock file."""
    with suppress(OSError, ValueError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        number = int(os.read(descriptor, 32))
        return f"another edgeinfer (process {number}{', which is stopped' if _is_stopped(number) else ''})"
    return "another edgeinfer"


def _is_stopped(process: int) -> bool:
    """Whether a process was stopped, for example by Ctrl-Z; False if unknown."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        return status.rpartition(")")[2].split()[0] == "T"
    return False


_locks: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()
_callbacks: "list[weakref.WeakMethod[Callable[[], None]]]" = []


def fork_safe_lock() -> threading.Lock:
    """A lock that a fork releases in the child, regardless of its state in the parent: the owning thread
    does not exist in the child.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def call_in_child(method: Callable[[], None]) -> None:
    """Call a method in forked children, as long as its object exists. Its locks are free then."""
    _callbacks[:] = [callback for callback in _callbacks if callback() is not None]
    _callbacks.append(weakref.WeakMethod(method))


def _free_in_child() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library's own locks do
    for callback in _callbacks:
        if (method := callback()) is not None:
            method()


if hasattr(os, "register_at_fork"):  # Windows has no fork.
    os.register_at_fork(after_in_child=_free_in_child)
