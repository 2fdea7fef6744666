"""One snapshot in a file: a line of JSON that describes it, then arrays as they lie in memory."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

VERSION = 1
MOST_HEAD_BYTES = 64 << 20
Array = npt.NDArray[np.generic]


class DamagedSnapshotError(Exception):
    """The file isn't what was once written; the text says why."""


@dataclass(frozen=True)
class Snapshot:
    """Keys and values of the first tokens of a text: `arrays` in the order in which an engine gives them."""

    ids: list[int]
    arrays: list[Array]

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write it in one stroke: a file of this name is whole, whatever happens. Raises `OSError`."""
    head = {
        "version": VERSION,
        "ids": snapshot.ids,
        "arrays": [[array.dtype.str, list(array.shape)] for array in snapshot.arrays],
    }
    fresh = path.with_suffix(f".{os.getpid()}.part")
    try:
        with fresh.open("wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            for array in snapshot.arrays:
                file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def read_snapshot(path: Path) -> Snapshot:
    """What `write_snapshot` left; arrays are mapped, and read from the disk when they are looked at.

    Raises:
        OSError: it can't be read.
        DamagedSnapshotError: it isn't whole.
    """
    with path.open("rb") as file:
        line = file.readline(MOST_HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
    try:
        head = json.loads(line)
        if head["version"] != VERSION:
            raise DamagedSnapshotError(f"{path}: version {head['version']}, wanted {VERSION}")
        ids = [int(token) for token in head["ids"]]
        shapes = [(np.dtype(kind), tuple(map(int, shape))) for kind, shape in head["arrays"]]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedSnapshotError(f"{path}: its first line is damaged ({error})") from None
    wanted = len(line) + sum(_nbytes(*each) for each in shapes)
    if size != wanted or any(kind.hasobject or min(shape, default=0) < 0 for kind, shape in shapes):
        raise DamagedSnapshotError(f"{path}: {size} bytes, wanted {wanted}")
    return Snapshot(ids, list(_arrays(path, len(line), shapes)))


def _nbytes(kind: "np.dtype[np.generic]", shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * kind.itemsize


def _arrays(
    path: Path, offset: int, shapes: Sequence[tuple["np.dtype[np.generic]", tuple[int, ...]]]
) -> Iterator[Array]:
    for kind, shape in shapes:
        yield np.memmap(path, kind, "r", offset, shape) if 0 not in shape else np.zeros(shape, kind)
        offset += _nbytes(kind, shape)
