"""The folders of compiled kernels: which there are, when they were last used, and removing what nobody needs.

A folder is named `machine-instruction set-digest`; the time of its last change is that of its last use, to
the day. Removing takes two steps, a rename and then the rest, so that a program that starts meanwhile finds a
whole folder or none; one that finds none builds its kernels anew.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DIGEST_CHARACTERS = 16
BUILDING, REMOVING = ".building-", ".removing-"
DAY = 86400.0
UNUSED_DAYS = 30
"""Kernels that nothing has used for so long are removed."""
SUPERSEDED_DAYS = 7
"""Sooner, if there are newer ones for the same instruction set: an older version may still run beside it."""
_NAME = re.compile(rf"(?P<target>[^.].*)-[0-9a-f]{{{DIGEST_CHARACTERS}}}")


@dataclass(frozen=True)
class KernelFolder:
    """One set of kernels."""

    path: Path
    target: str
    """Machine and instruction set, as `x86_64-avx2`."""
    used: float
    """When it was last used, in seconds since the epoch."""

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.o"))

    @property
    def units(self) -> list[str]:
        """The units that have been built."""
        return sorted(file.stem for file in self.path.glob("*.o"))


def kernel_folders(root: Path) -> list[KernelFolder]:
    """All sets of kernels below a cache folder, those used last first."""
    found = []
    for entry in _entries(root):
        name, changed = _NAME.fullmatch(entry.name), _changed(entry)
        if name and changed is not None:
            found.append(KernelFolder(Path(entry.path), name["target"], changed))
    return sorted(found, key=lambda folder: -folder.used)


def mark_used(folder: Path) -> None:
    """Remember that the folder is used today."""
    try:
        if time.time() - folder.stat().st_mtime > DAY:
            os.utime(folder)
    except OSError:  # somebody else's folder, which may be read only: its owner looks after it
        return


def remove_unused(root: Path, in_use: Path) -> list[Path]:
    """Remove the sets of kernels that nobody has used for a while, but for `in_use`; returns them.

    What can't be removed is left to a later start.
    """
    removed, now = [], time.time()
    current = next((folder.target for folder in kernel_folders(root) if folder.path == in_use), None)
    for folder in kernel_folders(root):
        days = SUPERSEDED_DAYS if folder.target == current else UNUSED_DAYS
        if folder.path != in_use and now - folder.used > days * DAY and _remove(folder.path, root):
            removed.append(folder.path)
    for entry in _entries(root):
        changed = _changed(entry)
        if entry.name.startswith((BUILDING, REMOVING)) and changed is not None and now - changed > DAY:
            # Left by a program that was killed.
            shutil.rmtree(entry.path, ignore_errors=True)
    return removed


def _remove(folder: Path, root: Path) -> bool:
    grave = root / f"{REMOVING}{os.getpid()}-{folder.name}"
    try:
        folder.rename(grave)
    except OSError:  # gone already, or in use on Windows
        return False
    shutil.rmtree(grave, ignore_errors=True)
    return True


def _changed(entry: os.DirEntry[str]) -> float | None:
    """When a folder was last changed; None if it is none, or gone by now."""
    try:
        return entry.stat().st_mtime if entry.is_dir(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            yield from list(entries)
    except FileNotFoundError:  # nothing has been built yet
        return
