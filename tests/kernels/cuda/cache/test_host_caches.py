"""Keys and values copied from the host cache and back."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionState
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_types import CacheType, element_types
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_kernels.cuda.cache.host_caches import HostCaches
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.rope_tables import head_order

POSITIONS = 80
KINDS: tuple[CacheType, ...] = ("f16", "f32", "fp8", "q8_0", "q4_0", "q8_0/q4_0")
WITHIN = {"f16": 0.0, "f32": 1e-3, "fp8": 0.25, "q8_0": 0.03, "q4_0": 0.7}
"""The largest error of a cached value."""


HEADS = [(32, 32, True), (40, 40, False), (40, 16, True), (48, 24, False)]
"""Elements of a key and of a value, and the pairs of RoPE."""


def attention(head_dim: int, value_dim: int, neox: bool) -> AttentionSpec:
    rope = RopeSpec((0.5,) * (head_dim // 2), neox)
    return AttentionSpec(4, 2, head_dim, 0.25, NormSpec("rms", 1e-5), rope, value_length=value_dim)


def rows(tokens: int, head_dim: int, seed: int) -> Any:
    """(tokens, kv_heads, head_dim) that a float16 can hold."""
    return np.random.default_rng(seed).standard_normal((tokens, 2, head_dim)).astype(np.float16)


def opened(spec: AttentionSpec, cache: LayerCache, device: str) -> HostCaches:
    """The layer's cache is that of layer 3."""
    counting = Arena()
    HostCaches({3: spec}, POSITIONS, counting)
    caches = HostCaches({3: spec}, POSITIONS, Arena(torch.device(device), counting.used))
    caches.connect({3: AttentionState(spec, cache)})
    return caches


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "value_dim", "neox"), HEADS)
def test_the_first_positions_are_copied_in_device_order(
    device: str, kind: CacheType, head_dim: int, value_dim: int, neox: bool
) -> None:
    spec = attention(head_dim, value_dim, neox)
    cache = LayerCache.allocate(spec, 64, kind)
    keys, values = rows(37, head_dim, 1), rows(37, value_dim, 2)
    cache.write(0, keys, values)
    here = opened(spec, cache, device).fetch(3, 37)
    order = head_order(spec.rope, head_dim)
    requested = keys.swapaxes(0, 1)[..., order], values.swapaxes(0, 1)
    held = zip((here.keys, here.values), requested, element_types(kind), strict=True)
    for result, expected, elements in held:
        assert result.shape == (2, POSITIONS, expected.shape[2])
        np.testing.assert_allclose(result[:, :37].cpu().numpy(), expected, atol=WITHIN[elements])


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "value_dim", "neox"), HEADS)
@pytest.mark.parametrize(("start", "tokens"), [(0, 16), (5, 30), (16, 1), (31, 33)])
def test_new_positions_are_copied_back_and_old_ones_are_unchanged(
    device: str, kind: CacheType, head_dim: int, value_dim: int, neox: bool, start: int, tokens: int
) -> None:
    spec = attention(head_dim, value_dim, neox)
    cache, requested = (LayerCache.allocate(spec, 64, kind) for _ in range(2))
    before = rows(start, head_dim, 3), rows(start, value_dim, 4)
    for each in (cache, requested) if start else ():
        each.write(0, *before)
    caches = opened(spec, cache, device)
    here = caches.fetch(3, start)
    keys, values = rows(tokens, head_dim, 5), rows(tokens, value_dim, 6)
    order, end = head_order(spec.rope, head_dim), start + tokens
    here.keys[:, start:end] = torch.from_numpy(keys.swapaxes(0, 1)[..., order].copy()).to(device)
    here.values[:, start:end] = torch.from_numpy(values.swapaxes(0, 1).copy()).to(device)
    caches.put_back(3, here, start, tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    requested.write(start, keys, values)
    for result, expected in zip(
        cache.read(end, head_dim, value_dim), requested.read(end, head_dim, value_dim), strict=True
    ):
        np.testing.assert_array_equal(result, expected)
