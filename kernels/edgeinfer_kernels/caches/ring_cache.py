"""The KV cache of attention with a window: a ring of the last positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import CacheShape, LayerCache, padded

RING_STEP = 512
"""Maximum tokens of a step, and the number of positions that a text can always be rewound."""
RING_SPARE = 272
"""Positions after the text that a step writes without the engine's knowledge, at most: pages of a tree
draft's branches, and tokens that a device evaluates ahead.
"""


def ring_for(window: int) -> int:
    """Number of positions of the ring for a window, a multiple of 16; 0: there is no window."""
    return padded(window + RING_STEP + RING_SPARE) if window else 0


@dataclass(frozen=True)
class RingCache(LayerCache):
    """A cache whose position p is at index p % size; `size` is a multiple of 16.

    The step at positions start… of n tokens writes all of them before it reads the `window` positions before
    each of them, so `size` is at least window - 1 + n. Layouts are those of `LayerCache`.
    """

    size: int = 0

    @classmethod
    def allocate(cls, specification: CacheShape, context: int, kind: CacheType) -> "RingCache":
        """A zeroed ring of `context` positions."""
        whole = LayerCache.allocate(specification, context, kind)
        return cls(whole.keys, whole.values, whole.key_scales, whole.value_scales, size=context)

    @property
    def ring(self) -> int:
        return self.size

    def slots(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return positions % self.size

    def runs(self, start: int, count: int) -> Iterator[tuple[int, slice]]:
        """As `LayerCache.runs`."""
        done = 0
        while done < count:
            slot = (start + done) % self.size
            some = min(count - done, self.size - slot)
            yield slot, slice(done, done + some)
            done += some

    def write(self, start: int, keys: npt.NDArray[np.floating], values: npt.NDArray[np.floating]) -> None:
        for slot, part in self.runs(start, len(values)):
            super().write(slot, keys[part], values[part])

    def write_keys(self, start: int, keys: npt.NDArray[np.floating]) -> None:
        for slot, part in self.runs(start, len(keys)):
            super().write_keys(slot, keys[part])

    def read(
        self, end: int, head_dim: int, value_dim: int | None = None
    ) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
        """As `LayerCache.read`; positions that the ring no longer holds are 0."""
        keys, values = super().read(self.size, head_dim, value_dim)
        return self._unrolled(keys, 0, end), self._unrolled(values, 0, end)

    def read_keys(self, start: int, end: int, head_dim: int) -> npt.NDArray[np.floating]:
        """As `LayerCache.read_keys`; positions that the ring no longer holds are 0."""
        return self._unrolled(super().read_keys(0, self.size, head_dim), start, end)

    def _unrolled(self, rows: npt.NDArray[np.floating], start: int, end: int) -> npt.NDArray[np.floating]:
        """Rows (kv_heads, size, elements) of the ring as those of positions start…end."""
        whole = np.zeros((len(rows), end - start, rows.shape[2]), rows.dtype)
        held = np.arange(max(start, end - self.size), end)
        whole[:, held - start] = rows[:, held % self.size]
        return whole

    def first(self, end: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As `LayerCache.first`; the whole ring if it is full."""
        return super().first(min(end, self.size))

    def copy(self, source: int, target: int, count: int) -> None:
        for (a, mine), (b, theirs) in product(self.runs(source, count), self.runs(target, count)):
            begin, end = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if begin < end:
                super().copy(a + begin - mine.start, b + begin - theirs.start, end - begin)

    def before_move(self, first: int, end: int) -> tuple[int, LayerCache]:
        """As `LayerCache.before_move`; a copy, because every index of the ring is both read and written."""
        scales = (self.key_scales, self.value_scales)
        of_keys, of_values = (None if array is None else array.copy() for array in scales)
        copied = LayerCache(self.keys.copy(), self.values.copy(), of_keys, of_values)
        return max(first, end - self.size), copied
