"""The folders of compiled kernels: lists them, records their last use, and removes unused ones.

A folder is named `machine-instruction set-digest`. Its modification time is the day of its last use. Removal
renames the folder first, so a program that starts at the same time finds a complete folder or none. If it
finds none, it builds its kernels again.
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
"""Kernels that were not used for this long are removed."""
SUPERSEDED_DAYS = 7
"""Shorter limit if newer kernels exist for the same instruction set; an older version may still be in use."""
_NAME = re.compile(rf"(?P<target>[^.].*)-[0-9a-f]{{{DIGEST_CHARACTERS}}}")


@dataclass(frozen=True)
class KernelFolder:
    """One set of compiled kernels."""

    path: Path
    target: str
    """Machine and instruction set, such as `x86_64-avx2`."""
    used: float
    """Time of the last use, in seconds since the epoch."""

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.o"))

    @property
    def units(self) -> list[str]:
        """The units that are built."""
        return sorted(file.stem for file in self.path.glob("*.o"))


def kernel_folders(root: Path) -> list[KernelFolder]:
    """All sets of kernels below a cache folder, most recently used first."""
    folders = []
    for entry in _entries(root):
        name, changed = _NAME.fullmatch(entry.name), _changed(entry)
        if name and changed is not None:
            folders.append(KernelFolder(Path(entry.path), name["target"], changed))
    return sorted(folders, key=lambda folder: -folder.used)


def mark_used(folder: Path) -> None:
    """Set the last use of the folder to today."""
    try:
        if time.time() - folder.stat().st_mtime > DAY:
            os.utime(folder)
    except OSError:  # Folder of another user, possibly read only: its owner maintains it.
        return


def remove_unused(root: Path, in_use: Path) -> list[Path]:
    """Remove sets of kernels that were not used for a while, except `in_use`; return the removed ones.

    A folder that cannot be removed is left for a later start.
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
            # Left over from a killed program.
            shutil.rmtree(entry.path, ignore_errors=True)
    return removed


def _remove(folder: Path, root: Path) -> bool:
    renamed = root / f"{REMOVING}{os.getpid()}-{folder.name}"
    try:
        folder.rename(renamed)
    except OSError:  # Already removed, or in use on Windows.
        return False
    shutil.rmtree(renamed, ignore_errors=True)
    return True


def _changed(entry: os.DirEntry[str]) -> float | None:
    """Modification time of a folder; None if it is not a folder or no longer exists."""
    try:
        return entry.stat().st_mtime if entry.is_dir(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            yield from list(entries)
    except FileNotFoundError:  # Nothing has been built yet.
        return
