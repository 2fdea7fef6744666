"""A folder of snapshots: the longest beginning of a text that was kept, and no more bytes than allowed."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgeinfer.kv_cache import shared_prefix
from edgeinfer.snapshots.snapshot_file import DamagedSnapshotError, Snapshot, read_snapshot, write_snapshot

LIMIT_BYTES = 4 << 30
"""Of all snapshots of all models."""
SUFFIX = ".kv"


class SnapshotStore:
    """Snapshots of one model (`model`: its fingerprint) in a folder that all models share.

    The least recently used go when all together take more than `limit_bytes`. What can't be written or read
    is left out, for it only saves time: `trouble` says what happened last.
    """

    def __init__(self, folder: Path, model: str, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._model = model
        self._limit = limit_bytes
        self.trouble: str | None = None

    def longest(self, ids: Sequence[int], more_than: int = 0) -> tuple[Snapshot, int] | None:
        """The snapshot that shares most of its first tokens with `ids`, and how many: more than so many."""
        if len(ids) <= more_than:
            return None
        best, most = None, more_than
        for count, path in self._own():
            if count <= more_than:
                continue
            snapshot = self._read(path)
            shared = shared_prefix(snapshot.ids, ids) if snapshot else 0
            if shared > most:
                best, most = (path, snapshot), shared
        if best is None or best[1] is None:
            return None
        with suppress(OSError):
            os.utime(best[0])
        return best[1], most

    def _read(self, path: Path) -> Snapshot | None:
        """None where it can't be read; a damaged one is thrown away."""
        try:
            return read_snapshot(path)
        except DamagedSnapshotError as error:
            self.trouble = str(error)
            path.unlink(missing_ok=True)
        except OSError as error:
            self.trouble = f"{path}: {error.strerror or error}"
        return None

    def keep(self, snapshot: Snapshot) -> bool:
        """Write a snapshot unless it is there; those of its own beginnings go. Whether it is there now."""
        if not snapshot.ids or snapshot.nbytes > self._limit:
            return False
        path = self._folder / f"{self._model}-{len(snapshot.ids)}-{_digest(snapshot.ids)}{SUFFIX}"
        try:
            if path.exists():
                os.utime(path)
                return True
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(snapshot.nbytes)
            write_snapshot(path, snapshot)
        except OSError as error:
            self.trouble = f"{self._folder}: {error.strerror or error}"
            return False
        for count, other in self._own():
            if count < len(snapshot.ids) and other.stem.endswith(_digest(snapshot.ids[:count])):
                other.unlink(missing_ok=True)
        return True

    def _own(self) -> Iterator[tuple[int, Path]]:
        """(tokens, file) of this model's."""
        for path in self._folder.glob(f"{self._model}-*{SUFFIX}"):
            count = path.stem.split("-")[1]
            if count.isdigit():
                yield int(count), path

    def _make_room(self, nbytes: int) -> None:
        """Delete what was used longest ago until so many more bytes may come."""
        files = sorted((each.stat().st_mtime_ns, each.stat().st_size, each) for each in self._all())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + nbytes <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _all(self) -> Iterator[Path]:
        return self._folder.glob(f"*{SUFFIX}")


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:16]
