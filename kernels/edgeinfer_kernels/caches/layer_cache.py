"""The KV cache of one layer in main memory, in the layout of the kernels, and its size in bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.cache_formats import (
    Rows,
    Scales,
    from_fp8,
    hadamard_rows,
    nibble_bytes,
    packed_in_groups,
    packed_in_pairs,
    rounded_to_bytes,
    rounded_to_nibbles,
    to_fp8,
    unpacked_groups,
    unpacked_pairs,
    widened,
)
from edgeinfer_kernels.caches.cache_types import (
    SCALED_TYPES,
    CacheType,
    ElementType,
    element_types,
    has_recent,
)
from edgeinfer_kernels.cpu.runtime.abi import SCALED

LANES = 16
SPARE_POSITIONS = 64
RECENT_PAGES_PER_SEQUENCE, RECENT_SPARE_PAGES = 12, 3
"""Pages of recent positions that are allocated for each sequence, and how many of all are read only as the
end of a tile of 64 positions; see `recent_pages.py`.
"""


def padded(count: int) -> int:
    """`count` rounded up to a multiple of the lanes."""
    return -(-count // LANES) * LANES


def paged(arrays: Sequence[npt.NDArray[np.generic]]) -> list[npt.NDArray[np.generic]]:
    """Views (heads, pages, …) of arrays of positions or of tiles."""
    return [array.reshape(len(array), -1, *_page_shape(array)) for array in arrays]


def recent_context(sequences: int) -> int:
    """The context whose cache has the recent positions of some sequences."""
    return LANES * RECENT_PAGES_PER_SEQUENCE * sequences - SPARE_POSITIONS


def _page_shape(array: npt.NDArray[np.generic]) -> tuple[int, ...]:
    """The shape of a page in an array of positions (heads, positions, elements), or of tiles (heads, tiles,
    elements, 16).
    """
    return (LANES, array.shape[2]) if array.ndim == 3 else array.shape[2:]


class CacheShape(Protocol):
    """The attributes that determine the size of a cache, of an attention specification."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


DTYPES: dict[ElementType, "np.dtype[Any]"] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "fp8": np.dtype(np.uint8),
    "q8_0": np.dtype(np.int8),
    "q4_0": np.dtype(np.uint8),
}


def type_of_elements(elements: Any, scales: Any) -> ElementType:
    """The type of an array of a cache, whose scales are None if it has none."""
    if elements.dtype == np.uint8:
        return "fp8" if scales is None else "q4_0"
    return next(kind for kind, dtype in DTYPES.items() if dtype == elements.dtype)


def key_bytes(width: int, kind: ElementType) -> int:
    """Bytes of a head's key with `width` elements, without scales."""
    return width // 2 if kind == "q4_0" else value_bytes(width, kind)


def value_bytes(width: int, kind: ElementType) -> int:
    """Bytes of a head's value with `width` elements, without scales."""
    return nibble_bytes(width) if kind == "q4_0" else width * DTYPES[kind].itemsize


def scale_count(width: int, kind: ElementType) -> int:
    """Scales of a head's key or value with `width` elements."""
    return -(-width // SCALED) if kind in SCALED_TYPES else 0


def scales_for(heads: int, positions: int, width: int, kind: ElementType) -> npt.NDArray[np.float16] | None:
    """Zeroed scales of keys or values; None: the type has none."""
    groups = scale_count(width, kind)
    return np.zeros((heads, positions // LANES, groups, LANES), np.float16) if groups else None


def rounded_rows(rows: Rows, kind: ElementType) -> tuple[npt.NDArray[Any], Scales | None]:
    """Rows (..., width) as elements of a type, and their scales; None: it has none. Codes of q4_0 are in the
    Hadamard basis and not packed.
    """
    if kind == "q4_0":
        return rounded_to_nibbles(hadamard_rows(rows))
    if kind == "q8_0":
        return rounded_to_bytes(rows)
    return to_fp8(rows) if kind == "fp8" else rows, None


def floats_of(elements: npt.NDArray[Any], scales: Scales | None, kind: ElementType) -> Rows:
    """Elements of a type, unpacked, as floats; of q4_0 in the Hadamard basis."""
    if scales is not None:
        return widened(elements.astype(np.int8), scales)
    return from_fp8(elements) if kind == "fp8" else elements


def by_position(tiles: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reshape (heads, tiles, elements, 16) to (heads, positions, elements)."""
    return tiles.swapaxes(2, 3).reshape(len(tiles), -1, tiles.shape[2])


@dataclass(frozen=True)
class LayerCache:
    """The KV cache of one layer; head_dim is padded to a multiple of 16.

    Keys: (kv_heads, tiles, head_dim, 16). Tile t holds positions 16·t…, so sixteen scores need no sum across
    lanes. Values: (kv_heads, positions, head_dim). One tile of 64 positions is allocated after the last. Both
    are floats (fp8: in bytes, `to_fp8`), or int8 with float16 scales (kv_heads, tiles, groups, 16); a group
    is `SCALED` elements of a head. In q4_0, heads are in the Hadamard basis (`hadamard_rows`) and have 4 bits
    per element (uint8, and scales). Two dimensions of a key share a byte (`packed_in_pairs`); the two halves
    of a value's group share bytes (`packed_in_groups`).
    """

    keys: npt.NDArray[np.generic]
    values: npt.NDArray[np.generic]
    key_scales: npt.NDArray[np.float16] | None = None
    value_scales: npt.NDArray[np.float16] | None = None
    recent: "LayerCache | None" = None
    """Recent positions in f16, in the same basis; see `recent_pages.py`."""

    @staticmethod
    def positions_for(context: int) -> int:
        """Positions that are allocated for `context` tokens."""
        return -(-context // LANES) * LANES + SPARE_POSITIONS

    @classmethod
    def nbytes_for(cls, specification: CacheShape, context: int, kind: CacheType) -> int:
        """Bytes that `allocate` takes."""
        width, (keys, values) = padded(specification.head_dim), element_types(kind)
        of_both = key_bytes(width, keys) + value_bytes(width, values)
        of_both += 2 * (scale_count(width, keys) + scale_count(width, values))
        recent = LayerCache.nbytes_for(specification, recent_context(1), "f16") if has_recent(kind) else 0
        return specification.kv_heads * cls.positions_for(context) * of_both + recent

    @classmethod
    def allocate(cls, specification: CacheShape, context: int, kind: CacheType) -> "LayerCache":
        """A zeroed cache for `context` tokens."""
        heads, positions = specification.kv_heads, cls.positions_for(context)
        width, (of_keys, of_values) = padded(specification.head_dim), element_types(kind)
        of_key = key_bytes(width, of_keys) // DTYPES[of_keys].itemsize
        of_value = value_bytes(width, of_values) // DTYPES[of_values].itemsize
        return cls(
            np.zeros((heads, positions // LANES, of_key, LANES), DTYPES[of_keys]),
            np.zeros((heads, positions, of_value), DTYPES[of_values]),
            scales_for(heads, positions, width, of_keys),
            scales_for(heads, positions, width, of_values),
        )

    def with_recent(self, sequences: int) -> Self:
        """The same cache with the recent positions of some sequences, in f16."""
        heads, positions = len(self.values), LayerCache.positions_for(recent_context(sequences))
        width = self.keys.shape[2] * (2 if self.key_type == "q4_0" else 1)
        keys = np.zeros((heads, positions // LANES, width, LANES), np.float16)
        return replace(self, recent=LayerCache(keys, np.zeros((heads, positions, width), np.float16)))

    @property
    def ring(self) -> int:
        """Number of positions after which the indices of the arrays start again; see `RingCache`."""
        return self.positions

    @property
    def positions(self) -> int:
        """Allocated positions."""
        return int(self.values.shape[1])

    @property
    def head_positions(self) -> int:
        """Number of positions between two heads in the arrays, more than `positions` in a pool."""
        return self.values.strides[0] // self.values.strides[1]

    def pooled(self, count: int) -> "tuple[LayerCache, list[LayerCache]]":
        """A zeroed cache of `count` times the positions, and its parts as caches like this one."""
        names = ("keys", "values", "key_scales", "value_scales")
        whole, parts = pooled_arrays([getattr(self, name) for name in names], count)
        recent, each = (None, [None] * count) if self.recent is None else self.recent.pooled(count)
        joined = LayerCache(**dict(zip(names, whole, strict=True)), recent=recent)
        return joined, [
            replace(self, **dict(zip(names, part, strict=True)), recent=own)
            for part, own in zip(parts, each, strict=True)
        ]

    @property
    def key_type(self) -> ElementType:
        return type_of_elements(self.keys, self.key_scales)

    @property
    def value_type(self) -> ElementType:
        return type_of_elements(self.values, self.value_scales)

    def write(self, start: int, keys: npt.NDArray[np.floating], values: npt.NDArray[np.floating]) -> None:
        """Write keys and values (tokens, kv_heads, head_dim) at positions start…"""
        self.write_keys(start, keys)
        position = np.arange(start, start + len(values))
        given, scales = rounded_rows(values, self.value_type)
        if self.value_scales is not None and scales is not None:
            self.value_scales[:, position // LANES, : scales.shape[-1], position % LANES] = scales
        if self.value_type == "q4_0":
            given = packed_in_groups(given)
        self.values[:, position, : given.shape[-1]] = given.swapaxes(0, 1)

    def write_keys(self, start: int, keys: npt.NDArray[np.floating]) -> None:
        """Write keys (tokens, kv_heads, head_dim) at positions start…"""
        position = np.arange(start, start + len(keys))
        tile, lane = position // LANES, position % LANES
        given, scales = rounded_rows(keys, self.key_type)
        if self.key_scales is not None and scales is not None:
            self.key_scales[:, tile, : scales.shape[-1], lane] = scales
        if self.key_type == "q4_0":
            missing = padded(given.shape[-1]) - given.shape[-1]
            given = packed_in_pairs(np.pad(given, ((0, 0), (0, 0), (0, missing))))
        self.keys[:, tile, : given.shape[-1], lane] = given

    def read(
        self, end: int, head_dim: int, value_dim: int | None = None
    ) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
        """Keys (kv_heads, end, head_dim) and values (kv_heads, end, value_dim) of the first `end` positions;
        value_dim None: head_dim.
        """
        values = self._stored_values(0, end, padded(head_dim))[:, :, : value_dim or head_dim]
        keys = self.read_keys(0, end, head_dim)
        return keys, hadamard_rows(values) if self.value_type == "q4_0" else values

    def _stored_values(self, start: int, end: int, width: int) -> Rows:
        """As `_stored_keys`, of the values."""
        rows: npt.NDArray[Any] = self.values[:, start:end]
        if self.value_type == "q4_0":
            rows = unpacked_groups(rows, width)
        scales = None
        if self.value_scales is not None:
            tiles = self.value_scales[:, start // LANES : -(-end // LANES)]
            scales = by_position(tiles)[:, start % LANES : start % LANES + end - start]
        return floats_of(rows, scales, self.value_type)

    def fill_recent(self, page: int, slot: int) -> None:
        """As `RecentCache.fill_recent`."""
        assert self.recent is not None
        first = int(self.slots(np.array([page * LANES]))[0])
        keys = self._stored_keys(first, first + LANES)
        self.recent.keys[:, slot] = keys.swapaxes(1, 2)
        values = self._stored_values(first, first + LANES, self.recent.values.shape[2])
        self.recent.values[:, slot * LANES : (slot + 1) * LANES] = values

    def recent_arrays(self) -> list[npt.NDArray[np.generic]]:
        """As `RecentCache.recent_arrays`."""
        return [] if self.recent is None else paged(self.recent.arrays())

    def read_keys(self, start: int, end: int, head_dim: int) -> npt.NDArray[np.floating]:
        """Keys (kv_heads, end - start, head_dim) of positions start…end."""
        keys = self._stored_keys(start, end)[:, :, :head_dim]
        return hadamard_rows(keys) if self.key_type == "q4_0" else keys

    def _stored_keys(self, start: int, end: int) -> Rows:
        """Keys (kv_heads, end - start, padded head_dim), of q4_0 in the Hadamard basis."""
        tiles = slice(start // LANES, -(-end // LANES))
        within = slice(start % LANES, start % LANES + end - start)
        rows = by_position(self.keys[:, tiles])[:, within]
        if self.key_type == "q4_0":
            rows = unpacked_pairs(rows)
        scales = None if self.key_scales is None else by_position(self.key_scales[:, tiles])[:, within]
        return floats_of(rows, scales, self.key_type)

    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """All arrays of the cache."""
        return self.values, *self.parts()

    def parts(self) -> tuple[npt.NDArray[np.generic], ...]:
        """The arrays whose second axis is tiles."""
        parts = (self.keys, self.key_scales, self.value_scales)
        return tuple(part for part in parts if part is not None)

    def first(self, end: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Views of the first `end` positions: values, and whole tiles of keys and scales."""
        return self.values[:, :end], *(part[:, : -(-end // LANES)] for part in self.parts())

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the keys and values of `count` positions from `source` to `target`; the ranges must not
        overlap.
        """
        for first in range(0, count, LANES):
            a, b, some = source + first, target + first, min(LANES, count - first)
            if a % LANES + some <= LANES and b % LANES + some <= LANES:
                for part in self.parts():
                    mine, theirs = part[:, a // LANES], part[:, b // LANES]
                    theirs[:, :, b % LANES : b % LANES + some] = mine[:, :, a % LANES : a % LANES + some]
                continue
            for part, i in product(self.parts(), range(some)):
                at, to = a + i, b + i
                part[:, to // LANES, :, to % LANES] = part[:, at // LANES, :, at % LANES]
        self.values[:, target : target + count] = self.values[:, source : source + count].copy()

    def before_move(self, first: int, end: int) -> tuple[int, "LayerCache"]:
        """The oldest cached position from `first` on, and the cache from which positions up to `end` are
        moved.
        """
        return first, self

    def move(self, source: npt.NDArray[np.int64], first: int, source_cache: "LayerCache") -> None:
        """Move the keys and values of positions `source` (ascending, none below its target) of another cache
        of the same layer, or of this one, to first…
        """
        target = self.slots(np.arange(first, first + len(source)))
        source = self.slots(source)
        self.values[:, target] = source_cache.values[:, source]
        for part, other in zip(self.parts(), source_cache.parts(), strict=True):
            part[:, target // LANES, :, target % LANES] = other[:, source // LANES, :, source % LANES]

    def runs(self, start: int, count: int) -> Iterator[tuple[int, slice]]:
        """The parts of positions start… that are contiguous in the arrays: the first index of each, and which
        of the `count` positions they are.
        """
        yield start, slice(0, count)

    def slots(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices of positions in the arrays."""
        return positions

    @property
    def nbytes(self) -> int:
        recent = 0 if self.recent is None else self.recent.nbytes
        return self.values.nbytes + sum(part.nbytes for part in self.parts()) + recent


def pooled_arrays(arrays: Sequence[Any], count: int) -> tuple[list[Any], list[list[Any]]]:
    """Zeroed arrays whose second axis is `count` times as long, and for each part of them the views that
    have the shapes of `arrays`; None for None.
    """
    whole = [
        None if a is None else np.zeros((a.shape[0], count * a.shape[1], *a.shape[2:]), a.dtype)
        for a in arrays
    ]

    def part(index: int) -> list[Any]:
        sizes = [0 if a is None else a.shape[1] for a in arrays]
        return [
            None if each is None else each[:, index * size : (index + 1) * size]
            for each, size in zip(whole, sizes, strict=True)
        ]

    return whole, [part(index) for index in range(count)]


def pool_positions(context: int, sequences: int) -> int:
    """Positions of a cache that has the bytes of this number of caches for `context` tokens."""
    if sequences == 1:
        return context
    return sequences * LayerCache.positions_for(context) - SPARE_POSITIONS
