"""A memory cgroup of this program, in which another program runs: version 1 or 2, made by hand."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import SettingError

ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class MemoryCgroup:
    """A group whose members have `limit` bytes together, their page cache included."""

    folder: Path
    limit: int

    def join(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_cgroup(limit: int) -> Iterator[MemoryCgroup]:
    """Make a group, and remove it at the end. Raises `SettingError`: this user may not."""
    for root, name in zip(ROOTS, LIMITS, strict=True):
        folder = root / f"edgeinfer-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / name).exists():
                (folder / name).write_text(str(limit))
                yield MemoryCgroup(folder, limit)
                return
        finally:
            folder.rmdir()
    raise SettingError(
        "--limit: saw no memory cgroup that this user may make; run it as root, or with --no-cgroup"
    )
