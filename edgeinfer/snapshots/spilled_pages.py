"""Pages of idle prefixes that a cache has no place for: in main memory, then in snapshot files on disk."""

import hashlib
import os
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgeinfer.snapshots.snapshot_file import (
    SUFFIX,
    DamagedSnapshotError,
    Snapshot,
    is_whole,
    read_snapshot,
    write_snapshot,
)
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.decoder_state import PageParts
from edgeinfer_kernels.system.private_folder import ensure_private
from edgeinfer_quant_formats.system.processes import is_alive

PAGES_PER_FILE = 16
"""Pages that are written to the disk together, at most."""
Key = bytes
"""A digest of all tokens of a page and of those before it."""
ROOT: Key = b""


@dataclass(frozen=True)
class SpillBudget:
    """Bytes of idle prefixes in main memory, and on the disk."""

    ram: int = 0
    disk: int = 0


class SpilledPage(NamedTuple):
    """A page in main memory: `parts` as of `Backend.read_pages`; `before`: the key of the page before it."""

    before: Key
    tokens: tuple[int, ...]
    parts: PageParts

    @property
    def key(self) -> Key:
        return page_key(self.before, self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class _FilePlace(NamedTuple):
    """Where a page is on the disk: a file, and its number there; and the key of the page before it."""

    path: Path
    number: int
    before: Key


@dataclass
class _Spilled:
    """The files of one process, by age; their bytes."""

    files: "OrderedDict[Path, tuple[int, list[Key]]]" = field(default_factory=OrderedDict)
    places: dict[Key, _FilePlace] = field(default_factory=dict)


def page_key(before: Key, tokens: Sequence[int]) -> Key:
    """The key of a page with these tokens after the page with the key `before`."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=20).digest()


class SpilledPages:
    """The least recently used pages leave main memory for the disk, and the disk for good."""

    def __init__(self, budget: SpillBudget, folder: Path | None = None) -> None:
        self._budget = budget
        self._pages: OrderedDict[Key, SpilledPage] = OrderedDict()
        self._disk = _Spilled()
        self._folder = (folder or spill_folder()) / f"{os.getpid()}-{id(self):x}"
        self._number = 0
        self._checked = set[Path]()
        """The files whose digest is correct."""
        self.ram_bytes = self.disk_bytes = 0
        """Bytes of the pages in main memory, and of the files."""
        self.last_error: str | None = None
        weakref.finalize(self, _remove, self._folder, os.getpid())

    def __contains__(self, key: Key) -> bool:
        return key in self._pages or key in self._disk.places

    def keep(self, page: SpilledPage) -> None:
        """Store a page; the budgets may drop others."""
        key = page.key
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        self._pages[key] = page
        self.ram_bytes += page.nbytes
        while self.ram_bytes > self._budget.ram:
            self._shrink()

    def take(self, key: Key) -> SpilledPage | None:
        """A page, which leaves main memory; None: it isn't here, or its file is damaged."""
        if (page := self._pages.pop(key, None)) is not None:
            self.ram_bytes -= page.nbytes
            return page
        place = self._disk.places.get(key)
        if place is None:
            return None
        try:
            if place.path not in self._checked and not is_whole(place.path):
                raise DamagedSnapshotError(f"{place.path}: its digest is wrong")
            snapshot = read_snapshot(place.path)
        except (DamagedSnapshotError, OSError) as error:
            self.last_error = str(error)
            self._drop_file(place.path)
            return None
        self._checked.add(place.path)
        self._disk.files.move_to_end(place.path)
        tokens = tuple(snapshot.ids[place.number * PAGE : (place.number + 1) * PAGE])
        parts: PageParts = [np.array(array[place.number]) for array in snapshot.arrays]
        return SpilledPage(place.before, tokens, parts)

    def _shrink(self) -> None:
        """Move the least recently used page of main memory, and those before it, to the disk."""
        key = next(iter(self._pages))
        group = [key]
        while len(group) < PAGES_PER_FILE and (before := self._pages[group[-1]].before) in self._pages:
            group.append(before)
        pages = [(each, self._pages.pop(each)) for each in reversed(group)]
        self.ram_bytes -= sum(page.nbytes for _, page in pages)
        fresh = [(each, page) for each, page in pages if each not in self._disk.places]
        if fresh and self._budget.disk:
            self._write(fresh)

    def _write(self, pages: Sequence[tuple[Key, SpilledPage]]) -> None:
        """Write pages to a file. An error is kept in `last_error`: spilled pages only save time."""
        arrays = [np.stack(parts) for parts in zip(*(page.parts for _, page in pages), strict=True)]
        snapshot = Snapshot([token for _, page in pages for token in page.tokens], [*arrays])
        if snapshot.nbytes > self._budget.disk:
            return
        path = self._folder / f"{self._number}{SUFFIX}"
        self._number += 1
        try:
            ensure_private(self._folder.parent)
            ensure_private(self._folder)
            write_snapshot(path, snapshot)
            size = path.stat().st_size
        except OSError as error:
            self.last_error = f"{path}: {error.strerror or error}"
            return
        self._disk.files[path] = size, [key for key, _ in pages]
        for index, (key, page) in enumerate(pages):
            self._disk.places[key] = _FilePlace(path, index, page.before)
        self.disk_bytes += size
        while self.disk_bytes > self._budget.disk:
            self._drop_file(next(iter(self._disk.files)))

    def _drop_file(self, path: Path) -> None:
        size, keys = self._disk.files.pop(path)
        self._checked.discard(path)
        self.disk_bytes -= size
        for key in keys:
            del self._disk.places[key]
        with suppress(OSError):
            path.unlink(missing_ok=True)


def spill_folder() -> Path:
    """The folder with the spilled pages of all processes; those of processes that have ended are deleted."""
    folder = user_folder("cache") / "spilled"
    for path in folder.glob("*-*"):
        number = path.name.split("-")[0]
        if number.isdigit() and not is_alive(int(number)):
            shutil.rmtree(path, ignore_errors=True)
    return folder


def _remove(folder: Path, process: int) -> None:
    """Remove the files of a process; a forked child has none there."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
