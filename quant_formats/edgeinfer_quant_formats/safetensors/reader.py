"""Reads one safetensors file: its checked header, and views of its tensors.

Source: the safetensors format; an 8-byte length, a JSON object of tensors with dtype, shape and data_offsets,
and the bytes of the tensors, in order and without gaps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.mapped_file import MappedFile

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20
MAX_DIMENSIONS = 8
METADATA = "__metadata__"
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1",
        "F8_E8M0": "u1", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4",
        "U16": "<u2", "U8": "u1", "BOOL": "?",
    }.items()
}  # fmt: skip
"""Name of a type -> that of its elements in numpy; BF16 and F8 as their bits."""


@dataclass(frozen=True, slots=True)
class SafetensorsInfo:
    """One tensor: type, shape, and where its bytes are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile(MappedFile):
    """An open safetensors file.

    Raises:
        FormatError: a damaged file.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, LENGTH_BYTES + 2, "safetensors")
        try:
            self.tensors, self.metadata = _read_header(path, self.data)
        except BaseException:
            self.close()
            raise

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor, in its shape. Raises `FormatError`: there is no such tensor."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{printable(self.path)}: no tensor {printable(name)}")
        return self.bytes_of(info).view(DTYPES[info.dtype]).reshape(info.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(path: Path, data: Any) -> tuple[dict[str, SafetensorsInfo], dict[str, str]]:
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > len(data):
        raise FormatError(
            f"{printable(path)}: a header of {length} bytes, wanted at most "
            f"{min(MAX_HEADER_BYTES, len(data) - LENGTH_BYTES)}"
        )
    try:
        header = json.loads(data[LENGTH_BYTES:start], object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{printable(path)}: header: {printable(error)}, wanted JSON") from None
    if not isinstance(header, dict):
        raise FormatError(f"{printable(path)}: header: saw {type(header).__name__}, wanted a JSON object")
    metadata = header.pop(METADATA, {})
    tensors = {name: _tensor(path, name, entry, start, len(data)) for name, entry in header.items()}
    _check_order(path, tensors, start, len(data))
    return tensors, metadata if isinstance(metadata, dict) else {}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> SafetensorsInfo:
    where = f"{printable(path)}: tensor {printable(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: wanted dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where}: dtype {printable(dtype)}, wanted one of {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"{where}: shape {printable(shape)}, wanted at most {MAX_DIMENSIONS} sizes")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise FormatError(f"{where}: data_offsets {printable(offsets)}, wanted {nbytes} bytes as its shape")
    if start + offsets[1] > size:
        raise FormatError(
            f"{where}: ends at byte {start + offsets[1]}, wanted at most {size}, the file's end"
        )
    return SafetensorsInfo(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_order(path: Path, tensors: Mapping[str, SafetensorsInfo], start: int, size: int) -> None:
    """Raise `FormatError` unless the tensors fill the file without gaps, as the format requires."""
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise FormatError(
                f"{printable(path)}: tensor {printable(info.name)}: starts at byte {info.offset}, wanted "
                f"{end}, the end of the one before"
            )
        end = info.offset + info.nbytes
    if end != size:
        raise FormatError(f"{printable(path)}: the tensors end at byte {end}, wanted {size}, the file's end")
