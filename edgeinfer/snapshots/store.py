"""A folder of snapshots with a size limit; finds the longest saved prefix of a text."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.snapshots.snapshot_file import (
    PART_SUFFIX,
    SUFFIX,
    DamagedSnapshotError,
    Snapshot,
    is_whole,
    read_snapshot,
    write_snapshot,
)
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.system.private_folder import ensure_private, others_may_read
from edgeinfer_quant_formats.system.processes import is_alive

Result = TypeVar("Result")

LIMIT_BYTES = 4 << 30
"""Maximum bytes of all snapshots of all models."""
HEAD_BYTES = 1 << 20
SAMPLES = 64
SAMPLE_BYTES = 4096


class SnapshotStore:
    """Snapshots of one model (`model`: its fingerprint) in a folder shared by all models.

    The least recently used are deleted when the total exceeds `limit_bytes`. Read and write errors are
    ignored, because a snapshot only saves time; `last_error` is the last error.
    """

    def __init__(self, folder: Path, model: str, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._model = model
        self._limit = limit_bytes
        self.last_error: str | None = None

    def longest(self, ids: Sequence[int], more_than: int = 0) -> tuple[Snapshot, int] | None:
        """The snapshot with the longest common prefix with `ids`, and its length: more than `more_than`
        tokens.
        """
        if len(ids) <= more_than:
            return None
        snapshots: list[tuple[int, Path, Snapshot]] = []
        for count, path in self._own():
            snapshot = self._guarded(path, read_snapshot) if count > more_than else None
            shared = shared_prefix(snapshot.ids, ids) if snapshot else 0
            if snapshot and shared > more_than:
                snapshots.append((shared, path, snapshot))
        for shared, path, snapshot in sorted(snapshots, key=lambda each: -each[0]):
            if self._guarded(path, _checked):
                with suppress(OSError):
                    os.utime(path)
                return snapshot, shared
        return None

    def _guarded(self, path: Path, read: Callable[[Path], Result]) -> Result | None:
        """The result of `read`; None if the file can't be read. A damaged file is removed."""
        try:
            return read(path)
        except DamagedSnapshotError as error:
            self.last_error = str(error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
        except OSError as error:
            self.last_error = f"{path}: {error.strerror or error}"
        return None

    def keep(self, snapshot: Snapshot, owner: str | None = None) -> bool:
        """Write a snapshot unless it exists; snapshots of its prefixes are deleted. Returns whether it
        exists.

        `owner`: id for `delete_snapshots`, hexadecimal digits.
        """
        if not snapshot.ids or snapshot.nbytes > self._limit:
            return False
        name = f"{self._model}-{len(snapshot.ids)}-{_digest(snapshot.ids)}"
        path = self._folder / f"{name}{f'-{owner}' if owner else ''}{SUFFIX}"
        try:
            if path.exists():
                os.utime(path)
                return True
            ensure_private(self._folder.parent)
            ensure_private(self._folder)
            remove_leftovers(self._folder)
            self._make_room(snapshot.nbytes)
            write_snapshot(path, snapshot)
        except OSError as error:
            self.last_error = f"{self._folder}: {error.strerror or error}"
            return False
        for count, other in self._own():
            if count < len(snapshot.ids) and other.stem.split("-")[2] == _digest(snapshot.ids[:count]):
                other.unlink(missing_ok=True)
        return True

    def _own(self) -> Iterator[tuple[int, Path]]:
        """(tokens, file) of this model's snapshots."""
        for path in self._folder.glob(f"{self._model}-*{SUFFIX}"):
            count = path.stem.split("-")[1:3]
            if len(count) == 2 and count[0].isdigit():
                yield int(count[0]), path

    def _make_room(self, nbytes: int) -> None:
        """Delete the least recently used snapshots until `nbytes` more fit."""
        files = sorted((each.stat().st_mtime_ns, each.stat().st_size, each) for each in self._all())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + nbytes <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _all(self) -> Iterator[Path]:
        return self._folder.glob(f"*{SUFFIX}")


def snapshots_folder() -> Path:
    """The folder with the snapshots of all models."""
    return user_folder("cache") / "snapshots"


def delete_snapshots(owner: str, folder: Path | None = None) -> None:
    """Delete the snapshots of an owner, for all models. Raises `OSError`."""
    folder = folder or snapshots_folder()
    remove_leftovers(folder)
    for path in folder.glob(f"*-{owner}{SUFFIX}"):
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete unfinished files of killed programs, and files of earlier releases that other users can read."""
    for path in folder.glob(f"*{PART_SUFFIX}"):
        number = path.stem.rpartition(".")[2]
        if not (number.isdigit() and is_alive(int(number))):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            if others_may_read(path):
                path.unlink()


def _checked(path: Path) -> bool:
    """True. Raises `DamagedSnapshotError`, `OSError`."""
    if not is_whole(path):
        raise DamagedSnapshotError(f"{path}: its digest is wrong")
    return True


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:16]


def file_fingerprint(path: Path, *properties: object) -> str:
    """32 hexadecimal digits: equal for equal files and equal `properties` (other inputs of keys and values).

    The first megabyte and 64 pages spread over the file are read: another quantization or training of the
    same model differs in nearly all of them. Raises `OSError`.
    """
    digest = hashlib.sha256(repr(properties).encode())
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(HEAD_BYTES))
        for sample in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
