"""The state of an attention block in main memory: its KV cache, with eviction, copies and pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.layer_cache import paged

POSITIONS_AT_ONCE = 1024


@dataclass(frozen=True)
class CacheState:
    """The cache of one attention block, in main memory; `spec`: of the block.

    Keys are cached after RoPE. Moving a key by n positions applies a RoPE of n positions more, because RoPE
    angles add. Source: Su et al. 2021, "RoFormer", §3.2; Xiao et al. 2023, "StreamingLLM", §3.2.
    """

    spec: Any
    cache: Any

    def keys(self, end: int) -> npt.NDArray[np.float32]:
        """(kv_heads, end, head_dim): the keys of the first `end` positions."""
        raise NotImplementedError

    def in_key_basis(self, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Queries (tokens, heads, head_dim) of a kernel, in the basis of `keys`."""
        raise NotImplementedError

    def rotated(self, first: int, last: int) -> npt.NDArray[np.floating]:
        """The elements with RoPE of the keys of positions first…last, (kv_heads, last - first, elements)."""
        raise NotImplementedError

    def store_rotated(self, first: int, keys: npt.NDArray[np.floating]) -> None:
        """The inverse of `rotated`, for positions first…"""
        raise NotImplementedError

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """As `BlockState.evict`, in chunks of about a thousand positions.

        Moved keys are dequantized, get RoPE and are quantized again. Values and scales are moved unchanged.
        """
        oldest, source_cache = self.cache.before_move(int(positions[0]), end)
        remaining = np.setdiff1d(np.arange(oldest, end), positions, assume_unique=True)
        to = oldest - int(np.searchsorted(positions, oldest))
        rope = replace(self.spec.rope, magnitude=1.0) if self.spec.rope else None
        table = rope.table(-len(positions), len(positions)) if rope else None
        for begin in range(0, len(remaining), POSITIONS_AT_ONCE):
            source = remaining[begin : begin + POSITIONS_AT_ONCE]
            first = to + begin
            self.cache.move(source, first, source_cache)
            if rope is None or table is None:
                continue
            distance = source - np.arange(first, first + len(source))
            keys = self.rotated(first, first + len(source)).astype(np.float32)
            self.store_rotated(first, rope.apply(keys, table[len(positions) - distance]))

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)

    def with_recent(self, sequences: int) -> Self:
        """The same with the recent positions of some sequences in f16."""
        return replace(self, cache=self.cache.with_recent(sequences))

    def pooled(self, count: int) -> "tuple[Self, list[Self]]":
        """As `BlockState.pooled`."""
        joined, caches = self.cache.pooled(count)
        return replace(self, cache=joined), [replace(self, cache=cache) for cache in caches]

    def views(self, end: int, slots: Any = ()) -> tuple[npt.NDArray[np.generic], ...]:
        """As `BlockState.views`."""
        views: tuple[npt.NDArray[np.generic], ...] = self.cache.first(end)
        return views

    def copy(self, source: int, target: int, count: int) -> None:
        """As `BlockState.copy`."""
        self.cache.copy(source, target, count)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As `BlockState.copy_pages`."""
        a, b = np.asarray(sources, np.intp), np.asarray(targets, np.intp)
        for pages in self.pages():
            pages[:, b] = pages[:, a]

    def pages(self) -> list[npt.NDArray[np.generic]]:
        """As `BlockState.pages`."""
        return paged(self.cache.arrays())
