"""Writes a GGUF file atomically: to a temporary file next to it, which is then renamed."""

import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.formats import FormatSpec, block_format
from edgeinfer_quant_formats.gguf.cursor import LONGEST_NAME
from edgeinfer_quant_formats.gguf.file_part import ALIGNMENT_KEY
from edgeinfer_quant_formats.gguf.metadata import Metadata
from edgeinfer_quant_formats.gguf.metadata_values import encode_text, encode_value
from edgeinfer_quant_formats.gguf.tensor_index import MAX_DIMENSIONS, TensorInfo
from edgeinfer_quant_formats.gguf.tensor_source import TensorSource, blocks_of, shape_of
from edgeinfer_quant_formats.gguf.value_types import DEFAULT_ALIGNMENT, MAGIC
from edgeinfer_quant_formats.system.files import replace_file, sync_folder
from edgeinfer_quant_formats.system.processes import is_alive

VERSION = 3


class GGUFWriter:
    """Collects metadata and tensors, then writes a GGUF v3 file.

    `metadata` from an open `GGUFFile` keeps the type of every value. A `general.alignment` in it is replaced
    by `alignment`. As a context manager it writes on exit without an exception.
    """

    def __init__(
        self,
        path: str | Path,
        metadata: Mapping[str, Any] | None = None,
        alignment: int = DEFAULT_ALIGNMENT,
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise FormatError(f"{printable(path)}: alignment {alignment}, wanted a power of two")
        self.path = Path(path)
        self.alignment = alignment
        self._values: dict[str, bytes] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._sources: dict[str, TensorSource] = {}
        self._end = 0
        if alignment != DEFAULT_ALIGNMENT:
            self.add_metadata(ALIGNMENT_KEY, alignment)
        for key in metadata or {}:
            if key == ALIGNMENT_KEY:
                continue
            if isinstance(metadata, Metadata):
                self._values[key] = metadata.encoded(key)
            elif metadata is not None:
                self.add_metadata(key, metadata[key])

    def add_metadata(self, key: str, value: Any) -> None:
        """Add a bool, number, string, list or one-dimensional array; numpy scalars determine the type.

        Raises:
            FormatError: a duplicate key, or a value that GGUF can't hold.
        """
        if key in self._values or not 0 < len(key.encode("utf-8", "surrogateescape")) <= LONGEST_NAME:
            raise FormatError(
                f"{printable(self.path)}: metadata key {printable(key)}: wanted a new key of "
                f"1 to {LONGEST_NAME} bytes"
            )
        try:
            self._values[key] = encode_value(value)
        except FormatError as error:
            raise FormatError(f"{printable(self.path)}: metadata key {printable(key)}: {error}") from None

    def add_tensor(
        self,
        name: str,
        source: TensorSource,
        format: str | FormatSpec,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Add a tensor of `shape` (rows, columns).

        `source` is one of: an array of weights, which is encoded; a uint8 array or bytes, which are used as
        blocks; an iterable of these; or a callable that returns any of them. The callable is evaluated on
        writing, so that a large model needn't be in memory.

        Raises:
            FormatError: a duplicate name, or a shape that `format` can't hold.
        """
        try:
            kind = block_format(format)
            shape = shape_of(source, kind, shape)
            nbytes = kind.nbytes(shape)
            if name in self._tensors:
                raise FormatError("the name is taken, wanted a new one")
            if len(shape) > MAX_DIMENSIONS:
                raise FormatError(f"{len(shape)} dimensions, wanted at most {MAX_DIMENSIONS}")
        except FormatError as error:
            raise FormatError(f"{printable(self.path)}: tensor {printable(name)}: {error}") from None
        self._tensors[name] = TensorInfo(name, shape, kind, self._end, nbytes, part=0)
        self._sources[name] = source
        self._end = self._aligned(self._end + nbytes)

    def write(self) -> None:
        """Write the file atomically: on failure or interruption the old file is unchanged.

        Raises:
            FormatError: a source with more or fewer bytes than its shape requires.
            OSError: the folder can't be written.
        """
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        _remove_leftovers(self.path)
        try:
            with partial.open("xb") as file:
                self._write_to(file)
                file.flush()
                os.fsync(file.fileno())
            replace_file(partial, self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.write()

    def _write_to(self, file: BinaryIO) -> None:
        header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(self._tensors), len(self._values)))
        for key, value in self._values.items():
            header += encode_text(key) + value
        for info in self._tensors.values():
            dimensions = info.shape[::-1]
            header += encode_text(info.name)
            header += struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
            header += struct.pack("<IQ", info.format.type_id, info.offset)
        file.write(header.ljust(self._aligned(len(header)), b"\0"))
        for name, info in self._tensors.items():
            self._write_tensor(file, info, self._sources[name])

    def _write_tensor(self, file: BinaryIO, info: TensorInfo, source: TensorSource) -> None:
        written = 0
        try:
            for block in blocks_of(source, info.format):
                written += len(block)
                if written > info.nbytes:
                    break
                file.write(block)
            if written != info.nbytes:
                more = "at least " if written > info.nbytes else ""
                raise FormatError(
                    f"the source gave {more}{written} bytes, wanted {info.nbytes} for {info.format.name} "
                    f"of shape {info.shape}"
                )
        except FormatError as error:
            raise FormatError(f"{printable(self.path)}: tensor {printable(info.name)}: {error}") from None
        file.write(bytes(self._aligned(written) - written))

    def _aligned(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment


def _remove_leftovers(path: Path) -> None:
    """Delete temporary files for `path` of processes that have ended."""
    start = f".{path.name}."
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        if entry.name.startswith(start) and entry.name.endswith(".partial"):
            number = entry.name.removeprefix(start).partition("-")[0]
            if number.isdecimal() and not is_alive(int(number)):
                entry.unlink(missing_ok=True)
