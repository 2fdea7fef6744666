"""The last positions of each sequence in f16, next to a KV cache of fewer bits.

A token reads its own page of sixteen positions and the two before in f16, all others as the cache has them:
queries attend most to the positions just before them. A page of the cache has a slot while it is among the
last that steps have read. A page that comes back without a slot (after a rewind, or of the prefix of another
sequence) is filled from the cache, with its fewer bits. Source: Liu et al. 2024, "KIVI", §3.3 (residual).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.layer_cache import LANES, RECENT_PAGES_PER_SEQUENCE, RECENT_SPARE_PAGES
from edgeinfer_kernels.cpu.runtime.abi import RECENT_PAGES

RECENT_STEP = 64
"""Maximum tokens of a step: all of them need slots."""
Pages = npt.NDArray[np.int64]


class RecentCache(Protocol):
    """A cache that has recent positions."""

    def fill_recent(self, page: int, slot: int) -> None:
        """Copy a page of the cache to a slot, as f16."""
        ...

    def recent_arrays(self) -> list[Any]:
        """Views (heads, slots, …) of the recent positions."""
        ...


class RecentPages:
    """The slots of the pages of some caches, which have them in common; `pages`: of a cache; `count`: slots.

    `table`: the slot of each page that has one. `joined`: the same in the caches of a `StatePool`, where the
    slots of this state start at `first`. A step has at most `longest` tokens.
    """

    def __init__(
        self,
        caches: Iterable[RecentCache],
        pages: int,
        count: int,
        *,
        first: int = 0,
        longest: int = RECENT_STEP,
    ) -> None:
        self._caches, self._first, self._longest = list(caches), first, longest
        self.table, self.joined = np.zeros(pages, np.int64), np.zeros(pages, np.int64)
        self._count = count
        self._slots = OrderedDict[int, int]()
        """Page -> slot; the next to be evicted first."""

    def touch(self, start: int, tokens: int, pages: Sequence[int] | None = None) -> None:
        """Give slots to the pages of a step of one sequence, at positions start…; `pages`: of the sequence,
        by their number there; None: it is the contiguous text.

        Raises:
            ValueError: the step has more tokens than `longest`.
        """
        if tokens > self._longest:
            raise ValueError(f"saw a step of {tokens} tokens, wanted {self._longest} with recent positions")
        first, written, last = _first_page(start), -(-start // LANES), (start + tokens - 1) // LANES
        needed = range(first, last + 1) if pages is None else pages[first : last + 1]
        self._take(needed, needed[written - first :])
        if tokens > LANES:  # Of a long step, the next one reads the last pages only.
            for page in reversed(needed[: _first_page(start + tokens) - first]):
                self._slots.move_to_end(page, last=False)

    def touch_batch(self, positions: Pages, pages: Pages) -> Pages | None:
        """Give slots to the pages of a step of several sequences, as in `BatchPositions`; return the slots of
        `pages`. None: there are too few, and the step reads all positions from the cache.
        """
        needed, new = dict[int, None](), set[int]()
        for row, position in zip(pages, positions.tolist(), strict=True):
            last = position // LANES
            needed.update(dict.fromkeys(row[_first_page(position) : last + 1].tolist()))
            if position % LANES == 0:
                new.add(int(row[last]))
        if len(needed) > self._count:
            self.drop(needed)
            return None
        self._take(needed, new)
        return np.ascontiguousarray(self.table[pages])

    def _take(self, pages: Iterable[int], new: Iterable[int]) -> None:
        """Give slots to `pages`; those that the step does not begin (`new`) are filled."""
        for page in pages:
            if page in self._slots:
                self._slots.move_to_end(page)
        for page in pages:
            if page not in self._slots:
                slot = self._assign(page)
                for cache in () if page in new else self._caches:
                    cache.fill_recent(page, slot)

    def _assign(self, page: int) -> int:
        """Give a page the slot of the least recently used one, or a free one."""
        if len(self._slots) < self._count:
            slot = next(iter(set(range(self._count)).difference(self._slots.values())))
        else:
            slot = self._slots.popitem(last=False)[1]
        self._slots[page] = slot
        self.table[page], self.joined[page] = slot, self._first + slot
        return slot

    def drop(self, pages: Iterable[int] | None = None) -> None:
        """Take the slots of pages whose content has changed in the cache; None: of all."""
        for page in list(self._slots) if pages is None else pages:
            self._slots.pop(page, None)

    def copy(self, source: int, target: int, count: int) -> None:
        """Follow a copy of `count` positions in the caches."""
        if source % LANES == target % LANES == 0 and count <= LANES:
            self.copy_pages([source // LANES], [target // LANES])
        else:
            self.drop(range(target // LANES, (target + count - 1) // LANES + 1))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow a copy of pages in the caches: copies have slots if their sources have."""
        copied = [
            (target, [array[:, [self._slots[source]]] for array in self._arrays()])
            for source, target in zip(sources, targets, strict=True)
            if source in self._slots
        ]
        self.drop(targets)
        for target, contents in copied:
            slot = self._assign(target)
            for array, content in zip(self._arrays(), contents, strict=True):
                array[:, [slot]] = content

    def _arrays(self) -> list[Any]:
        return [array for cache in self._caches for array in cache.recent_arrays()]


def recent_slots(sequences: int) -> int:
    """Slots of the recent positions of some sequences in main memory."""
    return RECENT_PAGES_PER_SEQUENCE * sequences - RECENT_SPARE_PAGES


def _first_page(position: int) -> int:
    """The first page that the token at this position reads in f16."""
    return max(0, position // LANES - (RECENT_PAGES - 1))
