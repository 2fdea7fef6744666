"""Latent caches of layers on the CPU, while the GPU computes the attention of a prefill."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec, LatentAttentionState
from edgeinfer_kernels.caches.latent_cache import LatentCache
from edgeinfer_kernels.caches.layer_cache import LANES, padded
from edgeinfer_kernels.cuda.cache.host_caches import (
    HostRows,
    from_fp8,
    hadamard_rows,
    packed_groups,
    rounded_rows,
    tiles_of,
    unpacked_groups,
)
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.cuda.weights.rope_tables import head_order


class HostLatents(HostRows):
    """Device memory for the largest layer's cache, from the arena. `layers`: those of the host, by index."""

    def __init__(self, layers: Mapping[Any, LatentAttentionSpec], positions: int, arena: Arena) -> None:
        self._specs, self._positions = layers, positions
        widths = (max(getattr(spec, name) for spec in layers.values()) for name in ("latent_dim", "rope_dim"))
        self._keys, self._values = (arena.take((width * positions,), torch.float16) for width in widths)
        self._caches: dict[Any, LatentCache] = {}
        self._orders: dict[Any, Tensor] = {}

    def connect(self, states: Mapping[Any, LatentAttentionState], slots: Any = None) -> None:
        """Set the host's states, by the index of their block."""
        self._caches = {index: state.cache for index, state in states.items()}
        for index, spec in self._specs.items():
            order = torch.from_numpy(head_order(spec.rope, spec.rope_dim))
            self._orders[index] = order.to(self._keys.device)

    def fetch(self, index: Any, start: int) -> DeviceCache:
        """The cache of block `index` with the first `start` positions from the host."""
        spec, host, nothing = self._specs[index], self._caches[index], self._keys[:0]
        latents, tails = (
            memory[: width * self._positions].view(1, self._positions, width)
            for memory, width in ((self._keys, spec.latent_dim), (self._values, spec.rope_dim))
        )
        if start:
            rows = self._sent(host.rows[0], start, 1)
            if host.row_type == "fp8":
                rows = from_fp8(rows)
            if host.scales is not None:
                rows = unpacked_groups(rows) if host.has_hadamard_rows else rows
                rows = rows * self._spread(host.scales[0], start, rows.shape[1])[:start]
            parts = rows[:, : spec.latent_dim], rows[:, spec.latent_dim : spec.cached_dim]
            if host.has_hadamard_rows:
                parts = hadamard_rows(parts[0]), hadamard_rows(parts[1])
            latents[0, :start].copy_(parts[0])
            tails[0, :start].copy_(parts[1].index_select(1, self._orders[index]))
        return DeviceCache(latents, nothing, tails, nothing)

    def put_back(self, index: Any, here: DeviceCache, start: int, tokens: int) -> None:
        """Copy positions start…start + tokens of `here` to the host's cache, after the device has computed
        them.
        """
        spec, host, end = self._specs[index], self._caches[index], start + tokens
        first, last = start // LANES, -(-end // LANES)
        inverse = torch.argsort(self._orders[index])
        latents, tails = here.keys[:, first * LANES : end], here.values[:, first * LANES : end]
        parts = latents, tails.index_select(2, inverse)
        if host.has_hadamard_rows:
            parts = hadamard_rows(parts[0]), hadamard_rows(parts[1])
        positions, width = (last - first) * LANES, padded(spec.cached_dim)
        rows, scales = rounded_rows(torch.cat(parts, 2), host.row_type, positions, width)
        if host.scales is not None and scales is not None:
            self._store(host.scales, first, tiles_of(scales), start)
        rows = packed_groups(rows) if host.has_hadamard_rows else rows
        self._store_rows(host.rows, start, rows[:, start - first * LANES : end - first * LANES])
