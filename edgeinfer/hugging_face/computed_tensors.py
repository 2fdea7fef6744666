"""Tensors that are computed when they are first read: small ones in memory, others in a temporary file.

The pages of the file can be released like those of a model's file, so that a large model needn't be in memory
twice.
"""

import mmap
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.hugging_face.stored import Stored
from edgeinfer_kernels.system.private_folder import ensure_private
from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.system.files import release_pages

SMALL_BYTES = 1 << 20
"""Tensors up to this size stay in memory."""
PAGE = mmap.ALLOCATIONGRANULARITY


class ComputedTensors:
    """The bytes of `stored` tensors. `spill`: the folder of the temporary file; None: all stay in memory
    until they are released.
    """

    def __init__(self, folder: Path, stored: Mapping[str, Stored], spill: Path | None) -> None:
        self._folder, self._stored, self._spill = folder, stored, spill
        self._in_memory: dict[str, NDArray[np.uint8]] = {}
        self._offsets: dict[str, int] = {}
        self._total = 0
        for name, each in stored.items():
            if spill is not None and each.nbytes > SMALL_BYTES:
                self._offsets[name] = self._total
                self._total += -(-each.nbytes // PAGE) * PAGE
        self._written: set[str] = set()
        self._map: mmap.mmap | None = None
        self._file: IO[bytes] | None = None

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, (nbytes,); read-only.

        Raises:
            FormatError: they don't fit its shape. OSError: the temporary file can't be written.
        """
        if name in self._written:
            return self._view(name)
        if name in self._in_memory:
            return self._in_memory[name]
        raw = np.ascontiguousarray(self._stored[name].load()).reshape(-1).view(np.uint8)
        expected = self._stored[name].nbytes
        if raw.nbytes != expected:
            raise FormatError(
                f"{printable(self._folder)}: tensor {printable(name)}: {raw.nbytes} bytes, wanted {expected} "
                f"for its shape {self._stored[name].shape}"
            )
        if name not in self._offsets:
            self._in_memory[name] = raw
            return raw
        self._write(name, raw)
        return self._view(name)

    def prepare(self, progress: Callable[[int, int], None] | None) -> None:
        """Compute all tensors of the temporary file; `progress` is called with bytes done and the total."""
        done, total = 0, sum(self._stored[name].nbytes for name in self._offsets)
        for name in self._offsets:
            self.bytes_of(name)
            self.release(name)
            done += self._stored[name].nbytes
            if progress is not None:
                progress(done, total)

    def release(self, name: str) -> bool:
        """Release the memory of a tensor, which can be read again. False if it stays: small ones do, at the
        same address, if others are in a file.
        """
        if name not in self._written:
            return self._spill is None and self._in_memory.pop(name, None) is not None
        if self._map is None:
            return False
        return release_pages(self._map, self._offsets[name], self._stored[name].nbytes)

    def close(self) -> None:
        """Forget all tensors; the file goes when the last view does."""
        self._in_memory.clear()
        self._written.clear()
        self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _view(self, name: str) -> NDArray[np.uint8]:
        assert self._map is not None
        view = np.frombuffer(self._map, np.uint8, self._stored[name].nbytes, self._offsets[name])
        view.flags.writeable = False
        return view

    def _write(self, name: str, raw: NDArray[np.uint8]) -> None:
        # Written by a system call: a full disk is an error there, but kills a process that writes to the map.
        if self._file is None:
            assert self._spill is not None
            ensure_private(self._spill)
            self._file = tempfile.TemporaryFile(dir=self._spill)  # noqa: SIM115 - closed by `close`
            self._file.truncate(self._total)
            self._map = mmap.mmap(self._file.fileno(), self._total)
        self._file.seek(self._offsets[name])
        self._file.write(raw.data)
        self._file.flush()
        self._written.add(name)
