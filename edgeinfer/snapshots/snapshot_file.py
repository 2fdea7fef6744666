"""The file format of a snapshot: one line of JSON, the arrays as in memory, and a digest."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

VERSION = 2
DIGEST_BYTES = 32
"""Bytes of the SHA-256 of all preceding data."""
SUFFIX = ".kv"
PART_SUFFIX = ".part"
ARRAY_TYPE = re.compile(r"[<|][fiu][1248]")
READ_BYTES = 1 << 20
MAX_HEAD_BYTES = 64 << 20
Array = npt.NDArray[np.generic]


class DamagedSnapshotError(Exception):
    """The file's content is damaged; the text gives the reason."""


@dataclass(frozen=True)
class Snapshot:
    """Keys and values of the first tokens of a text: `arrays` in the engine's order."""

    ids: list[int]
    arrays: list[Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot atomically, readable by this user only.

    Raises `OSError`.
    """
    head = {
        "version": VERSION,
        "ids": snapshot.ids,
        "arrays": [[array.dtype.str, list(array.shape)] for array in snapshot.arrays],
    }
    fresh = path.with_suffix(f".{os.getpid()}{PART_SUFFIX}")
    fresh.unlink(missing_ok=True)
    try:
        with open(fresh, "xb", opener=_private) as file:
            digest = hashlib.sha256()
            start = memoryview(json.dumps(head).encode() + b"\n")
            for part in (start, *map(_bytes_of, snapshot.arrays)):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def is_whole(path: Path) -> bool:
    """Whether a snapshot's digest is correct; reads the whole file. Raises `OSError`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
        while left > 0 and (part := file.read(min(left, READ_BYTES))):
            digest.update(part)
            left -= len(part)
        return left == 0 and file.read() == digest.digest()


def read_snapshot(path: Path) -> Snapshot:
    """Read a file of `write_snapshot`; arrays are memory-mapped and read on access. Only `is_whole` verifies
    their bytes.

    Raises:
        OSError: it can't be read.
        DamagedSnapshotError: it is incomplete.
    """
    with path.open("rb") as file:
        line = file.readline(MAX_HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
    try:
        head = json.loads(line)
        if head["version"] != VERSION:
            raise DamagedSnapshotError(f"{path}: version {head['version']}, wanted {VERSION}")
        ids = [int(token) for token in head["ids"]]
        shapes = [(_array_type(kind), tuple(map(int, shape))) for kind, shape in head["arrays"]]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DamagedSnapshotError(f"{path}: its first line is damaged ({type(error).__name__})") from None
    expected = len(line) + sum(_nbytes(*each) for each in shapes) + DIGEST_BYTES
    if size != expected or any(min(shape, default=0) < 0 for _, shape in shapes):
        raise DamagedSnapshotError(f"{path}: {size} bytes, wanted {expected}")
    return Snapshot(ids, list(_arrays(path, len(line), shapes)))


def _array_type(name: str) -> "np.dtype[np.generic]":
    if not ARRAY_TYPE.fullmatch(name):
        raise ValueError(name)
    return np.dtype(name)


def _nbytes(kind: "np.dtype[np.generic]", shape: Sequence[int]) -> int:
    return math.prod(shape) * kind.itemsize


def _arrays(
    path: Path, offset: int, shapes: Sequence[tuple["np.dtype[np.generic]", tuple[int, ...]]]
) -> Iterator[Array]:
    for kind, shape in shapes:
        yield np.memmap(path, kind, "r", offset, shape) if 0 not in shape else np.zeros(shape, kind)
        offset += _nbytes(kind, shape)
