"""Rounding, bytes and copies of a latent cache."""

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec, LatentAttentionState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.latent_cache import LatentCache, latent_type
from tests.kernels.caches.test_layer_cache import KINDS, WITHIN

RANDOM = np.random.default_rng(4)
SIZES = [(32, 16), (64, 16), (512, 64)]


def latent(latent_dim: int, rope_dim: int) -> LatentAttentionSpec:
    return LatentAttentionSpec(4, 32, rope_dim, 16, latent_dim, 0.25, NormSpec("rms", 1e-5), None)


def rows(tokens: int, width: int) -> npt.NDArray[np.float32]:
    return RANDOM.standard_normal((tokens, width)).astype(np.float32)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("latent_dim", "rope_dim"), SIZES)
def test_cached_rows_are_restored_within_rounding(kind: CacheType, latent_dim: int, rope_dim: int) -> None:
    cache = LatentCache.allocate(latent(latent_dim, rope_dim), 100, kind)
    given = rows(71, latent_dim + rope_dim)
    cache.write(0, given[:50])
    cache.write(50, given[50:])
    result = cache.read(0, 71)
    assert result.shape == given.shape
    assert np.sqrt(np.mean((result - given) ** 2)) <= WITHIN[latent_type(kind)]


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("latent_dim", "rope_dim"), SIZES)
@pytest.mark.parametrize("context", [1, 63, 4096])
def test_planned_bytes_equal_allocated_bytes(
    kind: CacheType, latent_dim: int, rope_dim: int, context: int
) -> None:
    spec = latent(latent_dim, rope_dim)
    assert LatentCache.nbytes_for(spec, context, kind) == LatentCache.allocate(spec, context, kind).nbytes


def test_a_position_takes_its_elements_once() -> None:
    per_position = LatentCache.nbytes_for(latent(512, 64), 4096, "f16") / (4096 + 64)
    assert per_position == 2 * (512 + 64)


@pytest.mark.parametrize("kind", ["f16", "fp8", "q8_0", "q4_0"])
def test_positions_are_copied_with_their_scales(kind: CacheType) -> None:
    spec = latent(64, 16)
    cache = LatentCache.allocate(spec, 192, kind)
    cache.write(0, rows(192, 80))
    expected = np.array(cache.read(0, 192))
    LatentAttentionState(spec, cache).copy(14, 35, 20)
    expected[35:55] = expected[14:34].copy()
    np.testing.assert_array_equal(cache.read(0, 192), expected)
