"""Recent positions in f16 on a device, next to KV caches of fewer bits; see `caches/recent_pages.py`.

The host gives pages their slots before it launches a step or a chunk, which it can do without the tokens:
kernels find the slots in a table on the device. It is sent when it has changed, once in sixteen tokens. The
last slot is that of the spare page, where padding is written.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.caches.recent_pages import RecentPages
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK, MAX_TOKENS
from edgeinfer_kernels.sizes.cuda_matrices import recent_device_slots

NIBBLES = tuple(index // 2 * 4 + index % 2 * 16 for index in range(8))
"""The first bit of each code of a word of q4_0."""


class DeviceRecentPages:
    """The recent positions of the caches of a model, whose `table` (pages,) int32 kernels read."""

    def __init__(self, caches: Iterable[DeviceCache], table: Tensor) -> None:
        self._table, self._last_page = table, len(table) - 1
        slots = recent_device_slots(PAGE * len(table))
        self._pages = RecentPages(map(_RecentRows, caches), len(table), slots - 1, longest=CHUNK + MAX_TOKENS)
        self._pages.table[self._last_page] = slots - 1
        shape, is_pinned = (2, len(table)), table.is_cuda
        self._held = torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned)
        """The last two tables, by turns: the device may still read the one before."""
        self._turn = 0

    def touch(self, start: int, tokens: int, pages: npt.NDArray[np.int64] | None = None) -> None:
        """Give slots to the pages of a step or a chunk at positions start…, and of the tokens that may follow
        it before the host takes part again; `pages`: of its sequence, None: it is the contiguous text.
        """
        if pages is None:
            tokens = min(tokens + MAX_TOKENS, PAGE * self._last_page - start)
        self._pages.touch(start, tokens, None if pages is None else pages.tolist())
        self._send()

    def touch_batch(self, positions: BatchPositions) -> None:
        """Give slots to the pages of a step of several sequences."""
        given = self._pages.touch_batch(positions.positions, positions.pages)
        assert given is not None, "there are slots for all sequences of a step"
        self._send()

    def drop(self, pages: Iterable[int] | None = None) -> None:
        """As `RecentPages.drop`."""
        self._pages.drop(pages)

    def copy(self, source: int, target: int, count: int) -> None:
        """As `RecentPages.copy`."""
        self._pages.copy(source, target, count)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As `RecentPages.copy_pages`."""
        self._pages.copy_pages(sources, targets)

    def _send(self) -> None:
        """Send the table to the device if it has changed."""
        table = self._pages.table
        if np.array_equal(self._held[self._turn].numpy(), table):
            return
        self._turn = 1 - self._turn
        held = self._held[self._turn]
        held.numpy()[:] = table
        self._table.copy_(held, non_blocking=True)


class _RecentRows:
    """The recent positions of one cache, as `RecentCache`."""

    def __init__(self, cache: DeviceCache) -> None:
        assert cache.recent is not None, "the cache has recent positions"
        self._cache, self._recent = cache, cache.recent

    def fill_recent(self, page: int, slot: int) -> None:
        """As `RecentCache.fill_recent`."""
        cache, first = self._cache, page * PAGE
        if cache.is_ring:
            first %= cache.positions
        parts = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
        for (elements, scales), rows in zip(parts, (self._recent.keys, self._recent.values), strict=True):
            filled = rows[:, slot * PAGE : (slot + 1) * PAGE]
            own = scales[:, first : first + PAGE] if scales.dim() > 1 else None
            filled.copy_(as_floats(elements[:, first : first + PAGE], own, filled.shape[2]))

    def recent_arrays(self) -> list[Tensor]:
        """As `RecentCache.recent_arrays`."""
        tensors = self._recent.keys, self._recent.values
        return [tensor.view(len(tensor), -1, PAGE, tensor.shape[2]) for tensor in tensors]


def as_floats(elements: Tensor, scales: Tensor | None, width: int) -> Tensor:
    """Rows (heads, positions, …) of a cache, in the layout of `cache_tiles.py`, as floats (heads, positions,
    width); of q4_0 in the Hadamard basis.
    """
    if elements.dtype == torch.uint8:
        return elements.contiguous().view(torch.float8_e4m3fn).float()
    if scales is None:
        return elements
    if elements.dtype == torch.int32:
        words = torch.stack([elements >> first & 15 for first in NIBBLES], -1)
        elements = words.flatten(2)[:, :, :width] - 8
    return elements * scales.float().repeat_interleave(32, dim=2)[:, :, :width]
