"""One GGUF file as a memory map: the header is read and checked, tensor bytes are not."""

import contextlib
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.gguf.cursor import Cursor
from edgeinfer_quant_formats.gguf.metadata import Metadata, read_metadata
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo, read_tensor_table
from edgeinfer_quant_formats.gguf.value_types import DEFAULT_ALIGNMENT, MAGIC, VERSIONS, ValueType

HEADER_BYTES = 4 + 4 + 8 + 8
ALIGNMENT_KEY = "general.alignment"


class FilePart:
    """One mapped file: its version, alignment, metadata and tensor table.

    Raises:
        FormatError: the file is damaged, or not a GGUF file of version 2 or 3.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, part: int = 0, *, unknown_types: bool = False) -> None:
        self.path = path
        self._map: mmap.mmap | None = _map_file(path)
        cursor = Cursor(self._map, str(path))
        try:
            self.version, tensor_count, key_count = read_header(cursor)
            self.metadata: Metadata = read_metadata(cursor, key_count)
            self.alignment = read_alignment(cursor, self.metadata)
            self.tensors: dict[str, TensorInfo] = read_tensor_table(
                cursor, tensor_count, self.alignment, part, unknown_types=unknown_types
            )
        except BaseException:
            self.close()
            raise

    def bytes_of(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes as a view of the map, (nbytes,)."""
        return np.frombuffer(self._open_map(), np.uint8, info.nbytes, info.offset)

    def release(self, info: TensorInfo) -> bool:
        """Release the tensor's whole pages to the system; a later read loads them again.

        False if the system doesn't support it.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return False
        page = mmap.PAGESIZE
        first = -(-info.offset // page) * page
        end = (info.offset + info.nbytes) // page * page
        if end > first:
            self._open_map().madvise(mmap.MADV_DONTNEED, first, end - first)
        return True

    def read_in_order(self, info: TensorInfo) -> bool:
        """Enable far read-ahead for the tensor's pages. False if the system doesn't support it."""
        if not hasattr(mmap, "MADV_SEQUENTIAL"):
            return False
        first = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._open_map().madvise(mmap.MADV_SEQUENTIAL, first, info.offset + info.nbytes - first)
        return True

    def check_size(self) -> None:
        """Raise `FormatError` if the file has been truncated since it was mapped: reading beyond its end
        would kill the process. Costs a system call.
        """
        if self._map is None:
            return
        size, mapped = self._map.size(), len(self._map)
        if size < mapped:
            raise FormatError(
                f"{printable(self.path)}: the file has {size} bytes, wanted the {mapped} that it had when it "
                "was opened: another program has cut it; restore it and load the model again"
            )

    def close(self) -> None:
        """Release the map. It stays mapped as long as a view of it exists."""
        if self._map is None:
            return
        # The map can't be closed while a view exists; it is unmapped with the last one.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._map = None

    def _open_map(self) -> mmap.mmap:
        if self._map is None:
            raise FormatError(f"{printable(self.path)}: the file is closed, wanted an open one")
        return self._map


def _map_file(path: Path) -> mmap.mmap:
    # Checked before opening: opening a pipe would block until a writer opens it.
    if path.exists() and not path.is_file():
        seen = "a directory" if path.is_dir() else "no regular file"
        raise FormatError(f"{printable(path)}: is {seen}, wanted a GGUF file")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < HEADER_BYTES:
            raise FormatError(
                f"{printable(path)}: header: the file has {size} bytes, wanted a GGUF file of at least "
                f"{HEADER_BYTES}"
            )
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors and number of metadata keys. Raises `FormatError`."""
    magic = cursor.data[: len(MAGIC)]
    cursor.take(len(MAGIC), "magic")
    if magic != MAGIC:
        raise cursor.error(f"magic {magic!r}, wanted {MAGIC!r}: not a GGUF file")
    version = cursor.uint32("version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS and 1 <= swapped <= max(VERSIONS):
        raise cursor.error(f"big-endian GGUF of version {swapped}, wanted little-endian")
    if version == 1:
        raise cursor.error(
            "GGUF version 1, wanted 2 or 3: version 1 counts in 32 bits; convert the model again"
        )
    if version not in VERSIONS:
        raise cursor.error(f"GGUF version {version}, wanted 2 or 3")
    return version, cursor.uint64("tensor count"), cursor.uint64("metadata key count")


def read_alignment(cursor: Cursor, metadata: Metadata) -> int:
    """The alignment of tensors. Raises `FormatError`."""
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT
    kind = metadata.type_of(ALIGNMENT_KEY)
    if metadata.is_array(ALIGNMENT_KEY) or kind is not ValueType.UINT32:
        seen = f"array of {kind.name}" if metadata.is_array(ALIGNMENT_KEY) else kind.name
        raise cursor.error(f"{ALIGNMENT_KEY} of type {seen}, wanted UINT32")
    alignment: int = metadata[ALIGNMENT_KEY]
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"{ALIGNMENT_KEY} {alignment}, wanted a power of two")
    return alignment
