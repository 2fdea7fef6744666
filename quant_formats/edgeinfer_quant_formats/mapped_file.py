"""A memory-mapped file of tensors: views of their bytes, and their pages in memory."""

import contextlib
import mmap
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.system.files import read_ahead, release_pages


class Location(Protocol):
    """Where a tensor's bytes are in its file."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class MappedFile:
    """A mapped file of at least `minimum` bytes; `kind` names it in messages.

    Raises:
        FormatError: no regular file, or a smaller one.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, minimum: int, kind: str) -> None:
        self.path = path
        self._map: mmap.mmap | None = _map_file(path, minimum, kind)

    @property
    def data(self) -> mmap.mmap:
        """The map. Raises `FormatError`: the file is closed."""
        if self._map is None:
            raise FormatError(f"{printable(self.path)}: the file is closed, wanted an open one")
        return self._map

    def bytes_of(self, info: Location) -> NDArray[np.uint8]:
        """The tensor's bytes as a view of the map, (nbytes,)."""
        return np.frombuffer(self.data, np.uint8, info.nbytes, info.offset)

    def release(self, info: Location) -> bool:
        """Release the tensor's whole pages to the system; a later read loads them again.

        False if the system doesn't support it.
        """
        return release_pages(self.data, info.offset, info.nbytes)

    def read_in_order(self, info: Location) -> bool:
        """Enable far read-ahead for the tensor's pages. False if the system doesn't support it."""
        return read_ahead(self.data, info.offset, info.nbytes)

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


def _map_file(path: Path, minimum: int, kind: str) -> mmap.mmap:
    # Checked before opening: opening a pipe would block until a writer opens it.
    if path.exists() and not path.is_file():
        seen = "a directory" if path.is_dir() else "no regular file"
        raise FormatError(f"{printable(path)}: is {seen}, wanted a {kind} file")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < minimum:
            raise FormatError(
                f"{printable(path)}: header: the file has {size} bytes, wanted a {kind} file of at least "
                f"{minimum}"
            )
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
