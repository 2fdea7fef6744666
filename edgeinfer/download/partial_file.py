"""Partial downloads, stored next to their destination; one program at a time appends to each."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from edgeinfer.errors import DownloadError

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
        if sys.platform == "win32":
            self._file.close()  # Windows can't rename an open file
        os.replace(self.path, destination)
        self._version_path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the data; a file that another program has since created under the same name is kept."""
        self.empty()
        if _is_same_file(self.path, self._file):
            self._version_path.unlink(missing_ok=True)
            if sys.platform != "win32":
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
        with path.open("a+b") as file:
            if not _locked(file):
                wait()
            elif _is_same_file(path, file) and not destination.exists():
                yield PartialFile(path, file)
                return


def _is_same_file(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file still has that path: another program may have finished or removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _locked(file: IO[bytes]) -> bool:
    """Lock the file for this program until it is closed; returns whether that succeeded."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(0x7FFFFFFF)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
