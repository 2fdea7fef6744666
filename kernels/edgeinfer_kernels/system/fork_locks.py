"""Locks that are released in a forked child, because the owning thread exists only in the parent."""

import os
import threading
import weakref

_locks: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()


def fork_safe_lock() -> threading.Lock:
    """A lock that a fork releases in the child, regardless of its state in the parent."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library's own locks do


if hasattr(os, "register_at_fork"):  # Windows has no fork.
    os.register_at_fork(after_in_child=_free_in_child)
