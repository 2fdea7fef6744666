"""Latent caches copied from the host and back."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec, LatentAttentionState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.latent_cache import LatentCache, latent_type
from edgeinfer_kernels.cuda.cache.host_latents import HostLatents
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.rope_tables import head_order
from tests.kernels.cuda.cache.test_host_caches import KINDS, POSITIONS, WITHIN

ROPES = [RopeSpec((0.5,) * 8, neox=False), RopeSpec((0.5,) * 8, neox=True), None]


def latent(rope: RopeSpec | None) -> LatentAttentionSpec:
    return LatentAttentionSpec(4, 32, 16, 16, 64, 0.25, NormSpec("rms", 1e-5), rope)


def rows(tokens: int, seed: int) -> Any:
    """(tokens, cached_dim) that a float16 can hold."""
    return np.random.default_rng(seed).standard_normal((tokens, 80)).astype(np.float16)


def opened(spec: LatentAttentionSpec, cache: LatentCache, device: str) -> HostLatents:
    """The cache is that of layer 3."""
    counting = Arena()
    HostLatents({3: spec}, POSITIONS, counting)
    caches = HostLatents({3: spec}, POSITIONS, Arena(torch.device(device), counting.used))
    caches.connect({3: LatentAttentionState(spec, cache)})
    return caches


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ROPES)
def test_the_first_positions_are_copied_in_device_order(
    device: str, kind: CacheType, rope: RopeSpec | None
) -> None:
    spec = latent(rope)
    cache = LatentCache.allocate(spec, 64, kind)
    given = rows(37, 1)
    cache.write(0, given)
    here = opened(spec, cache, device).fetch(3, 37)
    requested = given[:, :64], given[:, 64:][:, head_order(rope, 16)]
    for result, expected in zip((here.keys, here.values), requested, strict=True):
        assert result.shape == (1, POSITIONS, expected.shape[1])
        np.testing.assert_allclose(result[0, :37].cpu().numpy(), expected, atol=WITHIN[latent_type(kind)])


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("start", "tokens"), [(0, 16), (5, 30), (16, 1), (31, 33)])
def test_new_positions_are_copied_back_and_old_ones_are_unchanged(
    device: str, kind: CacheType, rope: RopeSpec | None, start: int, tokens: int
) -> None:
    spec = latent(rope)
    cache, requested = (LatentCache.allocate(spec, 64, kind) for _ in range(2))
    for each in (cache, requested) if start else ():
        each.write(0, rows(start, 3))
    caches = opened(spec, cache, device)
    here, given, end = caches.fetch(3, start), rows(tokens, 5), start + tokens
    here.keys[0, start:end] = torch.from_numpy(given[:, :64].copy()).to(device)
    tails = given[:, 64:][:, head_order(rope, 16)].copy()
    here.values[0, start:end] = torch.from_numpy(tails).to(device)
    caches.put_back(3, here, start, tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    requested.write(start, given)
    np.testing.assert_array_equal(cache.read(0, end), requested.read(0, end))
