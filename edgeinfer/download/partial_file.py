"""Partial downloads, stored next to their destination; one program at a time appends to each."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from edgeinfer.errors import DownloadError
from edgeinfer_kernels.system.locks import try_lock
from edgeinfer_quant_formats.system.files import replace_file

ENDING = ".partial"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Version:
    """The version of the file that is downloaded; it must not change between two requests."""

    tag: str | None = None
    total: int | None = None
    sha256: str | None = None

    def follows(self, earlier: "Version") -> bool:
        """Whether data of `earlier` may be used for this version: no known value differs, and an identifying
        one is equal.
        """
        pairs = [(mine, theirs) for mine, theirs in zip(self._values(), earlier._values(), strict=True)]
        known = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
        if self.sha256 is not None and self.sha256 == earlier.sha256:
            return True  # equal sha256: the same bytes, whatever the other values are
        return all(mine == theirs for mine, theirs in known)

    def _values(self) -> tuple[str | int | None, ...]:
        return self.tag, self.total, self.sha256


class PartialFile:
    """The bytes received, their running sha256, and their version. Created by `held`."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        self._version_path = version_path(path)
        self.version = self._read_version()
        self.size = file.seek(0, os.SEEK_END)
        self._hash = hashlib.sha256()
        self._hashed = 0

    def add(self, data: bytes) -> None:
        """Append received data."""
        self._file.write(data)
        self.size += len(data)
        if self._hashed == self.size - len(data):
            self._hash.update(data)
            self._hashed = self.size

    def begin(self, version: Version) -> None:
        """Store which version is downloaded."""
        if version != self.version:
            self.version = version
            self._version_path.write_text(json.dumps(asdict(version)), encoding="utf-8")

    def empty(self) -> None:
        """Discard the data."""
        self._file.seek(0)
        self._file.truncate()
        self.size = self._hashed = 0
        self._hash = hashlib.sha256()

    def sha256(self, progress: Callable[[int, int], None] | None = None) -> str:
        """The sha256 of all bytes; bytes of earlier runs are read for it."""
        self._file.flush()
        self._file.seek(self._hashed)
        while self._hashed < self.size:
            data = self._file.read(CHUNK)
            if not data:
                raise DownloadError(f"{self.path}: shorter than what was written; is another program at it?")
            self._hash.update(data)
            self._hashed += len(data)
            if progress:
                progress(self._hashed, self.size)
        self._file.seek(0, os.SEEK_END)
        return self._hash.hexdigest()

    def start(self, count: int) -> bytes:
        """The first `count` bytes."""
        self._file.flush()
        self._file.seek(0)
        data = self._file.read(count)
        self._file.seek(0, os.SEEK_END)
        return data

    def finish(self, destination: Path) -> None:
        """Flush the complete file to disk and rename it to `destination`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()  # Windows can't rename an open file
        replace_file(self.path, destination)
        self._version_path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the data, and close the file; without effect if that was done before."""
        if self._file.closed:
            return
        self.empty()
        self._file.close()  # Windows can't delete an open file
        self._version_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _read_version(self) -> Version:
        try:
            values: Any = json.loads(self._version_path.read_text(encoding="utf-8"))
            return Version(values["tag"], values["total"], values["sha256"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return Version()


def partial_path(destination: Path) -> Path:
    """Path of the partial file of `destination`."""
    return destination.with_name(destination.name + ENDING)


def version_path(partial: Path) -> Path:
    """Path of the file with the version of a partial file."""
    return partial.with_name(partial.name + ".json")


def lock_path(partial: Path) -> Path:
    """Path of the file that the program locks which writes a partial file: that one is renamed at the end,
    which Windows allows only if no other program has it open.
    """
    return partial.with_name(partial.name + ".lock")


@contextlib.contextmanager
def held(destination: Path, wait: Callable[[], None]) -> Iterator[PartialFile | None]:
    """Lock the partial file of `destination` for this program; None: the download is complete.

    `wait` is called repeatedly while another program holds the lock. On file systems without locks (some
    network drives), the user must avoid two pulls of one file at a time.
    """
    path = partial_path(destination)
    while True:
        if destination.exists():
            yield None
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_file(lock_path(path)) as is_locked:
            if not is_locked:
                wait()
            elif not destination.exists():
                with path.open("a+b") as file:
                    yield PartialFile(path, file)
                return


@contextlib.contextmanager
def _locked_file(path: Path) -> Iterator[bool]:
    """Lock a file during the context, and delete it at its end; False: another program has locked it, or has
    just deleted it.
    """
    file = path.open("a+b")
    locked = try_lock(file.fileno()) and _is_same_file(path, file)
    try:
        yield locked
    finally:
        # Deleted before the lock is released: afterwards it may be another program's. Windows deletes no open
        # file, neither ours nor another program's.
        deleted = not locked or _is_deleted(path)
        file.close()
        if not deleted:
            _is_deleted(path)


def _is_deleted(path: Path) -> bool:
    """Delete a file, if the system allows it."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def _is_same_file(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file still has that path: another program may have finished and deleted it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
