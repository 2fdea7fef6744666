"""Importance matrices: how strongly each column of each tensor is used on a calibration text.

Two formats are in use: a GGUF file with sums of squared activations and their counts, and the older .dat.
llama.cpp's imatrix tool writes both; `write_importance` writes the first.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.gguf.reader import GGUFFile
from edgeinfer_quant_formats.gguf.value_types import MAGIC
from edgeinfer_quant_formats.gguf.writer import GGUFWriter

SUMS_SUFFIX, COUNTS_SUFFIX = ".in_sum2", ".counts"
DATASETS_KEY, CHUNKS_KEY = "imatrix.datasets", "imatrix.chunk_count"
CHUNK_TOKENS_KEY = "imatrix.chunk_size"
LONGEST_NAME = 65535

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Importance:
    """Mean squared activations by tensor name: (columns,), or (matrices·columns,) for experts."""

    tensors: Mapping[str, Floats]
    chunks: int = 0
    dataset: str = ""


def read_importance(path: str | Path) -> Importance:
    """Read an importance matrix of either format.

    Raises:
        FormatError: a damaged file, or not an importance matrix.
        OSError: the file can't be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    importance = _read_gguf(path) if is_gguf else _read_legacy(path)
    if not importance.tensors:
        raise FormatError(f"{printable(path)}: holds no tensor, wanted an importance matrix")
    for name, values in importance.tensors.items():
        if not (np.isfinite(values) & (values >= 0)).all():
            raise FormatError(
                f"{printable(path)}: {printable(name)}: importance from {values.min()} to {values.max()}, "
                "wanted finite numbers of at least 0"
            )
    return importance


@dataclass(frozen=True, slots=True)
class InputSums:
    """What a text adds up to for one tensor: Σ x² of the inputs of each column, (matrices, columns), and the
    number of inputs of each matrix, (matrices,).
    """

    squares: NDArray[np.float64]
    counts: NDArray[np.int64]


def write_importance(
    path: str | Path, sums: Mapping[str, InputSums], dataset: str, chunks: int, chunk_tokens: int
) -> None:
    """Write the sums of all tensors as GGUF, in llama.cpp's format, completely or not at all.

    Raises:
        OSError: the file can't be written.
    """
    metadata = {
        "general.type": "imatrix",
        DATASETS_KEY: [dataset],
        CHUNKS_KEY: np.uint32(chunks),
        CHUNK_TOKENS_KEY: np.uint32(chunk_tokens),
    }
    with GGUFWriter(path, metadata) as writer:
        for name in sorted(sums):
            found = sums[name]
            writer.add_tensor(name + SUMS_SUFFIX, found.squares.astype(np.float32), "F32")
            writer.add_tensor(name + COUNTS_SUFFIX, found.counts.astype(np.float32)[:, None], "F32")


def _read_gguf(path: Path) -> Importance:
    with GGUFFile.open(path) as file:
        names = [name.removesuffix(SUMS_SUFFIX) for name in file.tensors if name.endswith(SUMS_SUFFIX)]
        if not names:
            raise FormatError(
                f"{printable(path)}: no tensor called ...{SUMS_SUFFIX} among its {len(file.tensors)}, "
                "wanted an importance matrix"
            )
        tensors = {name: _mean_squares(file, name) for name in names}
        datasets = file.metadata.get(DATASETS_KEY, [])
        return Importance(
            tensors,
            chunks=_count(path, file.metadata.get(CHUNKS_KEY, 0)),
            dataset=str(datasets[0]) if isinstance(datasets, list) and datasets else "",
        )


def _mean_squares(file: GGUFFile, name: str) -> Floats:
    """Sums divided by counts, with one count per matrix; a matrix that never ran gets uniform importance."""
    sums = file.decode(name + SUMS_SUFFIX)
    counts = np.rint(file.decode(name + COUNTS_SUFFIX)).reshape(-1, 1)
    if sums.size % len(counts):
        raise FormatError(
            f"{printable(file.path)}: {printable(name)}: {sums.size} sums and {len(counts)} counts, "
            "wanted as many sums for each count"
        )
    sums = sums.reshape(len(counts), -1)
    with np.errstate(all="ignore"):
        means = np.where(counts > 0, sums / counts, np.float32(1))
    return means.astype(np.float32).reshape(-1)


def _count(path: Path, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise FormatError(f"{printable(path)}: {CHUNKS_KEY} {printable(value)}, wanted a whole number")
    return value


def _read_legacy(path: Path) -> Importance:
    """The older format: int32 entries; each int32 length, name, int32 calls, int32 n, float32 sums[n].

    The int32 number of chunks and the data set's name may follow the entries.
    """
    reader = _LegacyReader(path)
    tensors: dict[str, Floats] = {}
    for _ in range(reader.number("count of entries", minimum=1)):
        name = reader.text("name", minimum=1)
        reader.location = printable(name)
        calls = reader.number("count of calls")
        sums = reader.floats(reader.number("count of values", minimum=1))
        tensors[name] = sums / np.float32(max(calls, 1))
    reader.location = "end"
    if reader.is_at_end:
        return Importance(tensors)
    chunks = reader.number("count of chunks")
    return Importance(tensors, chunks, "" if reader.is_at_end else reader.text("data set"))


class _LegacyReader:
    """Reads an older file with bounds checks."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._position = 0
        self._file = printable(path)
        self.location = "start"

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._data)

    def number(self, what: str, minimum: int = 0) -> int:
        value: int = struct.unpack("<i", self._take(4, what))[0]
        if value < minimum:
            raise self._error(f"{what} {value}, wanted at least {minimum}")
        return value

    def text(self, what: str, minimum: int = 0) -> str:
        length = self.number(f"length of the {what}", minimum)
        if length > LONGEST_NAME:
            raise self._error(f"{what} of {length} bytes, wanted at most {LONGEST_NAME}")
        return self._take(length, what).decode("utf-8", "surrogateescape")

    def floats(self, count: int) -> Floats:
        return np.frombuffer(self._take(4 * count, "values"), "<f4").astype(np.float32)

    def _take(self, size: int, what: str) -> bytes:
        left = len(self._data) - self._position
        if size > left:
            raise self._error(f"{what} takes {size} bytes, wanted at most {left}, which are left")
        self._position += size
        return self._data[self._position - size : self._position]

    def _error(self, text: str) -> FormatError:
        return FormatError(f"{self._file}: importance matrix: {self.location}: {text}")
