"""Copies of cache pages between a device and main memory, those of all layers together."""

from collections import deque
from collections.abc import Iterator, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SLICE_BYTES = 1 << 20
"""Bytes that are copied at a time. For larger tensors torch takes 20 MiB of device memory."""
RING = 2
"""Slices in pinned memory: the host copies one while the device copies the next."""
WORD_BYTES = 8
Bytes = npt.NDArray[np.uint8]


class PageCopies:
    """Reads and writes pages of tensors (heads, pages, …) of one allocation, as the bytes of all tensors.

    The allocation is a table of rows, of the greatest size such that each head's part of each page is whole
    rows. One index gathers the rows of all layers, so a slice takes three launches, whatever the model.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = [_Span(tensor) for tensor in tensors]
        row_bytes = gcd(*(size for span in spans for size in span.sizes)) or WORD_BYTES
        words = row_bytes // WORD_BYTES
        device = tensors[0].device if tensors else torch.device("cpu")
        self._cuda, self._row_bytes = device.type == "cuda", row_bytes
        memory = torch.empty(0, dtype=torch.int64, device=device)
        if tensors:
            memory.set_(tensors[0].untyped_storage())
        self._memory = memory[: len(memory) // words * words].view(-1, words)
        first = [span.rows(row_bytes) for span in spans]
        step = [np.full(len(rows), span.page // row_bytes) for rows, span in zip(first, spans, strict=True)]
        self._first, self._step = (
            torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(device)
            for rows in (first, step)
        )
        """The rows of page 0, and how many rows later the next page has each of them."""
        self._rows = max(1, SLICE_BYTES // row_bytes)
        shape = (min(self._rows, len(self._first)), words)
        self._ring = [torch.empty(shape, dtype=torch.int64, pin_memory=self._cuda) for _ in range(RING)]
        self._events = [torch.cuda.Event() for _ in range(RING)] if self._cuda else []

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return len(self._first) * self._row_bytes

    def read(self, pages: Sequence[int]) -> list[Bytes]:
        """(bytes,) of each page, in separate memory."""
        contents = [np.empty(self.nbytes, np.uint8) for _ in pages]
        started = deque[tuple[int, Bytes]]()
        for slot, index, part in self._slices(pages, contents):
            if len(started) == RING:
                self._end_read(*started.popleft())
            rows = self._memory.index_select(0, index)
            self._ring[slot][: len(rows)].copy_(rows, non_blocking=True)
            self._record(slot)
            started.append((slot, part))
        for each in started:
            self._end_read(*each)
        return contents

    def write(self, pages: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Write what `read` returned for each page to these pages."""
        for slot, index, part in self._slices(pages, contents):
            self._wait(slot)
            rows = self._ring[slot][: len(index)]
            rows.numpy().reshape(-1).view(np.uint8)[:] = part
            self._memory.index_copy_(0, index, rows.to(self._memory.device, non_blocking=True))
            self._record(slot)

    def _slices(self, pages: Sequence[int], contents: Sequence[Bytes]) -> Iterator[tuple[int, Tensor, Bytes]]:
        """For each slice of each page its place in the ring, its rows in the memory, and its bytes."""
        slot = 0
        for page, content in zip(pages, contents, strict=True):
            for begin in range(0, len(self._first), self._rows):
                end = begin + self._rows
                index = torch.add(self._first[begin:end], self._step[begin:end], alpha=page)
                yield slot, index, content[begin * self._row_bytes : end * self._row_bytes]
                slot = (slot + 1) % RING

    def _end_read(self, slot: int, part: Bytes) -> None:
        """Copy a slice to the bytes of its page, when the device has copied it."""
        self._wait(slot)
        part[:] = self._ring[slot].numpy().reshape(-1).view(np.uint8)[: len(part)]

    def _record(self, slot: int) -> None:
        if self._cuda:
            self._events[slot].record()

    def _wait(self, slot: int) -> None:
        """Wait until the device no longer uses a slice of the ring."""
        if self._cuda:
            self._events[slot].synchronize()


class _Span:
    """Where a tensor (heads, pages, …) is: bytes before it, of a head, and of a head's part of a page."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "heads and pages follow each other"
        self.heads = len(tensor)
        self.begin, self.head, self.page = (
            count * tensor.element_size()
            for count in (tensor.storage_offset(), tensor[0].numel(), tensor[0, 0].numel())
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.begin, self.head, self.page

    def rows(self, row_bytes: int) -> npt.NDArray[np.int64]:
        """The rows of page 0, of all heads."""
        heads = (self.begin + self.head * np.arange(self.heads)) // row_bytes
        rows: npt.NDArray[np.int64] = np.add.outer(heads, np.arange(self.page // row_bytes)).reshape(-1)
        return rows
