"""KV caches of layers with attention on the CPU, while the GPU computes the attention of a prefill.

One layer at a time is on the device in float16, with the head dimensions in the device's order. Cached
positions are copied from the host's cache first. New positions are copied back to it afterwards, in its
layout and type (`LayerCache`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionState
from edgeinfer_kernels.caches.cache_formats import rotation_block
from edgeinfer_kernels.caches.cache_types import SCALED_TYPES, ElementType
from edgeinfer_kernels.caches.layer_cache import LANES, LayerCache, padded
from edgeinfer_kernels.cpu.runtime.abi import SCALED
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.cuda.weights.rope_tables import head_order
from edgeinfer_kernels.sizes.cuda_matrices import SPARE_POSITIONS

Array = npt.NDArray[Any]


class HostRows:
    """Copies rows of the host's caches to the device and back."""

    _keys: Tensor
    _caches: Mapping[Any, Any]

    def memories(self) -> list[Tensor]:
        """The memory of the host's caches, as bytes."""
        return [
            torch.from_numpy(array.reshape(-1).view(np.uint8))
            for cache in self._caches.values()
            for array in cache.arrays()
        ]

    def _sent(self, rows: Array, start: int, positions: int) -> Tensor:
        """The first rows of a head, of `positions` each, up to position `start`; on the device."""
        there = torch.from_numpy(rows[: -(-start // positions)])
        return there.to(self._keys.device, non_blocking=True)

    @staticmethod
    def _rows(tiles: Tensor) -> Tensor:
        """(tiles, elements, 16) to (positions, elements)."""
        return tiles.transpose(1, 2).reshape(-1, tiles.shape[1])

    def _spread(self, scales: Array, start: int, width: int) -> Tensor:
        """Scales of one head expanded to each element, (positions, width) float32."""
        rows = self._rows(self._sent(scales, start, LANES)).float()
        return rows.repeat_interleave(SCALED, dim=1)[:, :width]

    def _floats(
        self, rows: Tensor, kind: ElementType, scales: Array | None, head: int, start: int, width: int
    ) -> Tensor:
        """The first `start` rows of elements or unpacked codes of one head as floats, (start, width)."""
        rows = rows[:start]
        if kind == "fp8":
            rows = from_fp8(rows)
        if scales is not None:
            rows = rows * self._spread(scales[head], start, rows.shape[1])[:start]
        rows = rows[:, :width]
        return hadamard_rows(rows) if kind == "q4_0" else rows

    def _store(self, target: Array, first: int, tiles: Tensor, start: int) -> None:
        """Store whole tiles (heads, tiles, elements, 16) from tile `first` on; positions before `start` are
        unchanged.
        """
        tiles = tiles.to(type_of(target))
        before = start % LANES
        if before:
            old = torch.from_numpy(np.ascontiguousarray(target[:, first, :, :before]))
            tiles[:, 0, :, :before] = old.to(tiles.device)
        for head, each in enumerate(tiles):
            torch.from_numpy(target[head, first : first + len(each)]).copy_(each, non_blocking=True)

    @staticmethod
    def _store_rows(target: Array, start: int, rows: Tensor) -> None:
        """Store rows (heads, tokens, width) from position `start` on."""
        rows = rows.to(type_of(target)).contiguous()
        for head, each in enumerate(rows):
            torch.from_numpy(target[head, start : start + len(each)]).copy_(each, non_blocking=True)


class HostCaches(HostRows):
    """Device memory for the largest layer's keys and values, from the arena. `layers`: those of the host, by
    index.
    """

    def __init__(self, layers: Mapping[Any, AttentionSpec], positions: int, arena: Arena) -> None:
        self._layers, self._context = layers, positions - SPARE_POSITIONS
        rows = [(spec, spec.device_rows(self._context)) for spec in layers.values()]
        keys = max((count * spec.head_dim for spec, count in rows), default=0)
        values = max((count * spec.value_dim for spec, count in rows), default=0)
        self._keys, self._values = (arena.take((count,), torch.float16) for count in (keys, values))
        self._caches: dict[Any, LayerCache] = {}
        self._orders: dict[Any, Tensor] = {}

    def connect(self, states: Mapping[Any, AttentionState], slots: Any = None) -> None:
        """Set the host's states, by the index of their block."""
        self._caches = {index: state.cache for index, state in states.items()}
        for index, spec in self._layers.items():
            order = torch.from_numpy(head_order(spec.rope, spec.head_dim))
            self._orders[index] = order.to(self._keys.device)

    def _room(self, spec: AttentionSpec) -> DeviceCache:
        rows, nothing = spec.device_rows(self._context), self._keys[:0]
        keys, values = (
            memory[: rows * width].view(spec.kv_heads, -1, width)
            for memory, width in ((self._keys, spec.head_dim), (self._values, spec.value_dim))
        )
        return DeviceCache(keys, nothing, values, nothing, spec.has_ring(self._context))

    def fetch(self, index: Any, start: int) -> DeviceCache:
        """The keys and values of block `index` with the first `start` positions from the host; of a ring
        those that it holds, at the same rows.
        """
        spec, host, order = self._layers[index], self._caches[index], self._orders[index]
        start = min(start, host.ring)
        here = self._room(spec)
        for head in range(spec.kv_heads if start else 0):
            keys = self._rows(self._sent(host.keys[head], start, LANES))
            if host.key_type == "q4_0":
                keys = _pairs(keys)
            keys = self._floats(keys, host.key_type, host.key_scales, head, start, spec.head_dim)
            values = self._sent(host.values[head], start, 1)
            if host.value_type == "q4_0":
                values = unpacked_groups(values)
            values = self._floats(values, host.value_type, host.value_scales, head, start, spec.value_dim)
            here.keys[head, :start].copy_(keys.index_select(1, order))
            here.values[head, :start].copy_(values)
        return here

    def put_back(self, index: Any, here: DeviceCache, start: int, tokens: int) -> None:
        """Copy positions start…start + tokens of `here` to the host's cache, after the device has computed
        them.
        """
        for row, part in self._caches[index].runs(start, tokens):
            self._put_back(index, here, row, row + part.stop - part.start)

    def _put_back(self, index: Any, here: DeviceCache, start: int, end: int) -> None:
        """Copy the rows start…end."""
        spec, host = self._layers[index], self._caches[index]
        first, last = start // LANES, -(-end // LANES)
        inverse = torch.argsort(self._orders[index])
        width = padded(spec.head_dim)
        keys = here.keys[:, first * LANES : end].index_select(2, inverse)
        values, positions = here.values[:, first * LANES : end], (last - first) * LANES
        if host.key_type == "q4_0":
            keys = hadamard_rows(keys)
        if host.value_type == "q4_0":
            values = hadamard_rows(values)
        codes, scales = rounded_rows(keys, host.key_type, positions, width)
        codes = _packed_in_pairs(codes) if host.key_type == "q4_0" else codes
        self._store(host.keys, first, tiles_of(codes), start)
        rows, value_scales = rounded_rows(values, host.value_type, positions, width)
        rows = packed_groups(rows) if host.value_type == "q4_0" else rows
        self._store_rows(host.values, start, rows[:, start - first * LANES : end - first * LANES])
        for target, each in ((host.key_scales, scales), (host.value_scales, value_scales)):
            if target is not None and each is not None:
                self._store(target, first, tiles_of(each), start)


def from_fp8(rows: Tensor) -> Tensor:
    """`cache_formats.from_fp8` on the device."""
    return rows.contiguous().view(torch.float8_e4m3fn).float()


def type_of(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def padded_rows(rows: Tensor, positions: int, width: int) -> Tensor:
    """(heads, positions, width), zero-padded."""
    missing = (0, width - rows.shape[2], 0, positions - rows.shape[1])
    return torch.nn.functional.pad(rows, missing)


def tiles_of(rows: Tensor) -> Tensor:
    """(heads, positions, elements) to (heads, tiles, elements, 16)."""
    return rows.unflatten(1, (-1, LANES)).transpose(2, 3).contiguous()


def rounded_rows(rows: Tensor, kind: ElementType, positions: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Rows (heads, tokens, elements), for q4_0 in the Hadamard basis, as elements of a cache (heads,
    positions, width), zero-padded, 4-bit codes unpacked; and their scales.
    """
    rows = padded_rows(rows, positions, width)
    if kind == "fp8":
        return rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), None
    return rounded(rows, kind == "q4_0") if kind in SCALED_TYPES else (rows, None)


def rounded(rows: Tensor, nibbles: bool) -> tuple[Tensor, Tensor]:
    """`cache_formats.rounded_to_bytes` or `rounded_to_nibbles` on the device: codes in float32, scales in
    float16.
    """
    width = rows.shape[2]
    groups = -(-width // SCALED)
    parts = torch.nn.functional.pad(rows.float(), (0, groups * SCALED - width)).unflatten(2, (groups, SCALED))
    furthest, ends = parts.abs().amax(-1) / 127, (-127, 127)
    if nibbles:
        highest, lowest = parts.amax(-1), parts.amin(-1)
        furthest, ends = torch.where(highest > -lowest, highest, lowest) / -8, (-8, 7)
    scales = furthest.clamp(-65504, 65504).half()
    wide = scales.float()[..., None]
    codes = torch.where(wide != 0, parts / torch.where(wide != 0, wide, 1.0), 0.0).round().clamp(*ends)
    return codes.flatten(2)[:, :, :width], scales


def hadamard_rows(rows: Tensor) -> Tensor:
    """`cache_formats.hadamard_rows` on the device, (..., head_dim) float32."""
    block, step = rotation_block(rows.shape[-1]), 1
    x = rows.float().reshape(-1, block)
    while step < block:
        a, b = x.view(len(x), -1, 2, step).unbind(2)
        x = torch.stack((a + b, a - b), 2).view(-1, block)
        step *= 2
    return (x * block**-0.5).view(rows.shape)


def _pairs(packed: Tensor) -> Tensor:
    """`cache_formats.unpacked_pairs` of rows (n, bytes), in float32."""
    return (torch.stack((packed & 15, packed >> 4), -1).float() - 8).flatten(1)


def unpacked_groups(packed: Tensor) -> Tensor:
    """`cache_formats.unpacked_groups` of rows (n, bytes), whole groups, in float32."""
    parts = packed.unflatten(1, (-1, SCALED // 2))
    return (torch.stack((parts & 15, parts >> 4), 2).float() - 8).flatten(1)


def _packed_in_pairs(codes: Tensor) -> Tensor:
    """`cache_formats.packed_in_pairs` of (heads, positions, width)."""
    low, high = (codes + 8).to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
    return low | high << 4


def packed_groups(codes: Tensor) -> Tensor:
    """`cache_formats.packed_in_groups` of (heads, positions, width)."""
    missing = -codes.shape[2] % SCALED
    raised = (torch.nn.functional.pad(codes, (0, missing)) + 8).to(torch.uint8)
    low, high = raised.unflatten(2, (-1, 2, SCALED // 2)).unbind(3)
    return (low | high << 4).flatten(2)
