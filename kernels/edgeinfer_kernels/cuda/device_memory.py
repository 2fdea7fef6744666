"""Device memory: one allocation split into tensors, the upload of file bytes into it, and device errors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from edgeinfer_kernels.sizes.cuda_matrices import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 8 << 20
"""Bytes of the file that are transferred and packed at a time."""
RING = 3
COPY_THREADS = 4


class DeviceMemoryError(MemoryError):
    """The device is out of memory; the message has the requested and the free bytes."""


class Arena:
    """Memory allocated once and split into tensors; without a device it only counts bytes.

    The same code that builds a model in an arena returns its size when run on a counting arena.

    Raises:
        DeviceMemoryError: the device has less free memory.
    """

    def __init__(self, device: torch.device | None = None, nbytes: int = 0) -> None:
        self.used = 0
        self._memory: Tensor | None = None
        if device is not None:
            self._memory = _allocate(device, nbytes)

    def take(self, shape: "Sequence[int]", dtype: torch.dtype) -> Tensor:
        """A zeroed tensor; on a counting arena without memory."""
        elements = int(np.prod(shape, dtype=np.int64))
        nbytes = elements * dtype.itemsize
        start = self.used
        self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._memory is None:
            return torch.empty(tuple(shape), dtype=dtype, device="meta")
        return self._memory[start : start + nbytes].view(dtype).view(tuple(shape))

    def matrix(self, name: str, format_name: str, rows: int, columns: int) -> DeviceMatrix:
        """Allocate a matrix in planes. Raises `UnsupportedOnDeviceError`."""
        shapes = PlaneShapes.of(name, format_name, rows, columns)
        parts = [
            self.take(shape, torch.int32) for shape in (shapes.words, shapes.scales, shapes.super_scales)
        ]
        return DeviceMatrix(shapes, format_name, *parts)

    def close(self) -> None:
        """Free the device memory."""
        device = None if self._memory is None else self._memory.device
        self._memory = None
        if device is not None and device.type == "cuda":
            torch.cuda.empty_cache()


def _allocate(device: torch.device, nbytes: int) -> Tensor:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info(device)
        raise DeviceMemoryError(
            f"the allocation needs {nbytes / 2**20:.0f} MiB and the GPU has {free / 2**20:.0f} MiB free"
        ) from None


class Uploader:
    """Uploads rows of the memory-mapped file to the device through a small ring of pinned memory.

    The host uses no memory beyond the ring; copies into it, transfers and packing overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._pool = ThreadPoolExecutor(COPY_THREADS)
        self._lock = 0
        if self._pinned:
            self._ring = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
            self._events = [torch.cuda.Event() for _ in range(RING)]

    def chunks(self, raw: npt.NDArray[np.uint8], row_multiple: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, (rows, bytes) uint8 on the device) of `raw`; all chunks but the last have a
        multiple of `row_multiple` rows.
        """
        rows, row_bytes = raw.shape
        step = max(CHUNK_BYTES // row_bytes // row_multiple, 1) * row_multiple
        for first in range(0, rows, step):
            yield first, self._upload(raw[first : first + step])

    def _upload(self, rows: npt.NDArray[np.uint8]) -> Tensor:
        if not self._pinned or rows.nbytes > CHUNK_BYTES:
            return torch.from_numpy(np.array(rows)).to(self.device)
        slot = self._lock = (self._lock + 1) % RING
        self._events[slot].synchronize()
        staged = self._ring[slot][: rows.nbytes]
        target = staged.numpy().reshape(rows.shape)
        bounds = [len(rows) * part // COPY_THREADS for part in range(COPY_THREADS + 1)]

        def copy(part: int) -> None:
            target[bounds[part] : bounds[part + 1]] = rows[bounds[part] : bounds[part + 1]]

        list(self._pool.map(copy, range(COPY_THREADS)))
        sent = staged.to(self.device, non_blocking=True).view(rows.shape)
        self._events[slot].record()
        return sent

    def close(self) -> None:
        """Wait for running transfers and free the ring."""
        self._pool.shutdown()
        if self._pinned:
            torch.cuda.synchronize(self.device)
            self._ring = []


class KernelsUnavailableError(RuntimeError):
    """Triton cannot compile here; the message names what is missing."""
