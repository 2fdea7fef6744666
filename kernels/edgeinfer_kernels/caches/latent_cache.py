"""The cache of latent attention in main memory, in the layout of the kernels, and its size in bytes."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.cache_formats import (
    hadamard_rows,
    packed_in_groups,
    unpacked_groups,
)
from edgeinfer_kernels.caches.cache_types import CacheType, ElementType, element_types, has_recent
from edgeinfer_kernels.caches.layer_cache import (
    DTYPES,
    LANES,
    LayerCache,
    by_position,
    floats_of,
    padded,
    paged,
    pooled_arrays,
    recent_context,
    rounded_rows,
    scale_count,
    scales_for,
    type_of_elements,
    value_bytes,
)
from edgeinfer_kernels.cpu.runtime.abi import SCALED

Rows = npt.NDArray[np.floating]


def latent_type(kind: CacheType) -> ElementType:
    """The type of rows that are both keys and values: that of keys, which need more precision."""
    return element_types(kind)[0]


class LatentShape(Protocol):
    """The attributes that determine the size of a cache, of a latent attention specification."""

    @property
    def latent_dim(self) -> int: ...
    @property
    def cached_dim(self) -> int: ...


@dataclass(frozen=True)
class LatentCache:
    """The cached rows of one layer: the latent vector, which is also the value, and the key's other elements.

    Rows: (1, positions, cached_dim), padded to a multiple of 16, as the values of a `LayerCache`: floats, FP8
    in bytes, or int8 or 4-bit codes with float16 scales (1, tiles, groups, 16). In q4_0, both parts of a row
    are in the Hadamard basis, each of its length.
    """

    rows: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float16] | None
    latent_dim: int
    cached_dim: int
    recent: "LatentCache | None" = None
    """As of `LayerCache`."""

    @staticmethod
    def nbytes_for(shape: LatentShape, context: int, kind: CacheType) -> int:
        """Bytes that `allocate` takes."""
        width, elements = padded(shape.cached_dim), latent_type(kind)
        of_row = value_bytes(width, elements) + 2 * scale_count(width, elements)
        recent = LatentCache.nbytes_for(shape, recent_context(1), "f16") if has_recent(kind) else 0
        return LayerCache.positions_for(context) * of_row + recent

    @classmethod
    def allocate(cls, shape: LatentShape, context: int, kind: CacheType) -> "LatentCache":
        """A zeroed cache for `context` tokens."""
        positions, width, elements = (
            LayerCache.positions_for(context), padded(shape.cached_dim), latent_type(kind),
        )  # fmt: skip
        dtype = DTYPES[elements]
        rows = np.zeros((1, positions, value_bytes(width, elements) // dtype.itemsize), dtype)
        scales = scales_for(1, positions, width, elements)
        return cls(rows, scales, shape.latent_dim, shape.cached_dim)

    def with_recent(self, sequences: int) -> "LatentCache":
        """As `LayerCache.with_recent`."""
        return replace(self, recent=LatentCache.allocate(self, recent_context(sequences), "f16"))

    def fill_recent(self, page: int, slot: int) -> None:
        """As `RecentCache.fill_recent`."""
        assert self.recent is not None
        rows = self._stored(page * LANES, (page + 1) * LANES)
        self.recent.rows[0, slot * LANES : (slot + 1) * LANES] = rows

    def recent_arrays(self) -> list[npt.NDArray[np.generic]]:
        """As `RecentCache.recent_arrays`."""
        return [] if self.recent is None else paged(self.recent.arrays())

    @property
    def positions(self) -> int:
        """Allocated positions."""
        return int(self.rows.shape[1])

    def pooled(self, count: int) -> "tuple[LatentCache, list[LatentCache]]":
        """As `LayerCache.pooled`."""
        (rows, scales), parts = pooled_arrays([self.rows, self.scales], count)
        recent, each = (None, [None] * count) if self.recent is None else self.recent.pooled(count)
        joined = replace(self, rows=rows, scales=scales, recent=recent)
        return joined, [
            replace(self, rows=rows, scales=scales, recent=own)
            for (rows, scales), own in zip(parts, each, strict=True)
        ]

    @property
    def ring(self) -> int:
        """As of a `LayerCache`."""
        return self.positions

    @property
    def row_type(self) -> ElementType:
        return type_of_elements(self.rows, self.scales)

    @property
    def has_hadamard_rows(self) -> bool:
        """Whether the cache is q4_0."""
        return self.row_type == "q4_0"

    def hadamard(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Rows (..., cached_dim) with each part times the Hadamard matrix."""
        parts = np.split(rows, [self.latent_dim], axis=-1)
        return np.concatenate([hadamard_rows(part) for part in parts], axis=-1)

    def write(self, start: int, rows: Rows) -> None:
        """Write rows (tokens, cached_dim) at positions start…"""
        self.write_part(start, rows[:, : self.latent_dim], 0)
        self.write_part(start, rows[:, self.latent_dim :], self.latent_dim)

    def write_part(self, start: int, part: Rows, first: int) -> None:
        """Write the elements from `first` on, the beginning of a part of a row, at positions start…"""
        position = np.arange(start, start + len(part))
        given, scales = rounded_rows(part, self.row_type)
        if self.scales is not None and scales is not None:
            groups = slice(first // SCALED, first // SCALED + scales.shape[-1])
            self.scales[0, position // LANES, groups, position % LANES] = scales
        if self.has_hadamard_rows:
            given = packed_in_groups(given)
        begin = first // 2 if self.has_hadamard_rows else first
        self.rows[0, position, begin : begin + given.shape[-1]] = given

    def read(self, start: int, end: int) -> Rows:
        """Rows (end - start, cached_dim) of positions start…end."""
        floats = self._stored(start, end)[:, : self.cached_dim]
        return self.hadamard(floats) if self.has_hadamard_rows else floats

    def _stored(self, start: int, end: int) -> Rows:
        """Rows (end - start, padded cached_dim), of q4_0 in the Hadamard basis."""
        rows: npt.NDArray[Any] = self.rows[0, start:end]
        if self.has_hadamard_rows:
            rows = unpacked_groups(rows, padded(self.cached_dim))
        scales = None
        if self.scales is not None:
            tiles = self.scales[:, start // LANES : -(-end // LANES)]
            scales = by_position(tiles)[0, start % LANES : start % LANES + end - start]
        return floats_of(rows, scales, self.row_type)

    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """All arrays of the cache."""
        return (self.rows,) if self.scales is None else (self.rows, self.scales)

    def first(self, end: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Views of the first `end` positions: rows, and whole tiles of scales."""
        scales = () if self.scales is None else (self.scales[:, : -(-end // LANES)],)
        return self.rows[:, :end], *scales

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the rows of `count` positions from `source` to `target`; the ranges must not overlap."""
        if self.scales is not None:
            a, b = np.arange(source, source + count), np.arange(target, target + count)
            self.scales[:, b // LANES, :, b % LANES] = self.scales[:, a // LANES, :, a % LANES]
        self.rows[:, target : target + count] = self.rows[:, source : source + count]

    def before_move(self, first: int, end: int) -> tuple[int, "LatentCache"]:
        """As `LayerCache.before_move`."""
        return first, self

    def move(self, source: npt.NDArray[np.int64], first: int, source_cache: "LatentCache") -> None:
        """Move the rows of positions `source` (ascending, none below its target) to first…"""
        target = np.arange(first, first + len(source))
        self.rows[:, target] = self.rows[:, source]
        if self.scales is not None:
            moved = self.scales[:, source // LANES, :, source % LANES]
            self.scales[:, target // LANES, :, target % LANES] = moved

    @property
    def nbytes(self) -> int:
        recent = 0 if self.recent is None else self.recent.nbytes
        return sum(array.nbytes for array in self.arrays()) + recent
