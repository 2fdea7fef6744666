"""A shifted cache equals one with the tokens after the gap written at their new positions."""

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionState
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec, LatentAttentionState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.latent_cache import LatentCache
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_kernels.decoder_state import check_evicted
from edgeinfer_kernels.reference.blocks.attention import apply_rope

END = 200
NEAR = {"f32": 2e-5, "f16": 2e-3, "fp8": 0.1, "q8_0": 0.02, "q4_0": 0.2}
"""Relative to the keys: each is rounded once more."""
FREQUENCIES = tuple(float(0.6**i) for i in range(12))


def attention(rope: RopeSpec | None) -> AttentionSpec:
    return AttentionSpec(4, 2, 32, 0.25, NormSpec("rms", 1e-5), rope)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", ["f32", "f16", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("keep", "dropped"), [(0, 16), (4, 10), (21, 48), (16, 96), (37, 160)])
def test_keys_are_rotated_back_and_values_are_moved(
    kind: CacheType, neox: bool, keep: int, dropped: int
) -> None:
    spec = attention(RopeSpec(FREQUENCIES, neox, magnitude=1.3))
    random = np.random.default_rng(keep)
    keys, values = (random.standard_normal((END, 2, 32)).astype(np.float32) for _ in range(2))
    shifted, expected = (LayerCache.allocate(spec, END, kind) for _ in range(2))
    shifted.write(0, apply_rope(keys, spec.rope, 0), values)
    AttentionState(spec, shifted).evict(np.arange(keep, keep + dropped), END)
    rest = [*range(keep), *range(keep + dropped, END)]
    expected.write(0, apply_rope(keys[rest], spec.rope, 0), values[rest])
    (actual_keys, actual_values), (expected_keys, expected_values) = (
        cache.read(len(rest), 32) for cache in (shifted, expected)
    )
    np.testing.assert_array_equal(actual_values, expected_values)
    np.testing.assert_array_equal(actual_keys[:, :keep], expected_keys[:, :keep])
    error = np.linalg.norm(actual_keys - expected_keys) / np.linalg.norm(expected_keys)
    assert error < NEAR[kind]


def test_without_rope_keys_are_moved_bit_for_bit() -> None:
    spec = attention(None)
    keys = np.random.default_rng(1).standard_normal((END, 2, 32)).astype(np.float32)
    cache = LayerCache.allocate(spec, END, "q4_0")
    cache.write(0, keys, keys)
    before = [np.array(part) for part in cache.read(END, 32)]
    AttentionState(spec, cache).evict(np.arange(5, 69), END)
    for old, new in zip(before, cache.read(END - 64, 32), strict=True):
        np.testing.assert_array_equal(new[:, 5:], old[:, 69:])


@pytest.mark.parametrize("kind", ["f32", "f16", "fp8", "q8_0", "q4_0"])
def test_each_key_is_rotated_by_its_shift(kind: CacheType) -> None:
    spec = attention(RopeSpec(FREQUENCIES, True))
    random = np.random.default_rng(2)
    keys, values = (random.standard_normal((END, 2, 32)).astype(np.float32) for _ in range(2))
    remaining = np.sort(random.choice(END, 70, replace=False))
    evicted = np.setdiff1d(np.arange(END), remaining)
    shifted, expected = (LayerCache.allocate(spec, END, kind) for _ in range(2))
    shifted.write(0, apply_rope(keys, spec.rope, 0), values)
    AttentionState(spec, shifted).evict(evicted, END)
    expected.write(0, apply_rope(keys[remaining], spec.rope, 0), values[remaining])
    (actual_keys, actual_values), (expected_keys, expected_values) = (
        cache.read(70, 32) for cache in (shifted, expected)
    )
    np.testing.assert_array_equal(actual_values, expected_values)
    assert np.linalg.norm(actual_keys - expected_keys) / np.linalg.norm(expected_keys) < NEAR[kind]


@pytest.mark.parametrize("evicted", [[], [-1, 3], [5, END], [7, 6], [6, 6]])
def test_positions_outside_the_cache_are_refused(evicted: list[int]) -> None:
    with pytest.raises(ValueError, match=f"to evict, wanted rising ones of {END}"):
        check_evicted(np.array(evicted, np.int64), END)


@pytest.mark.parametrize("kind", ["f32", "f16", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize("neox", [True, False])
def test_latent_vectors_are_moved_and_their_tails_are_rotated(kind: CacheType, neox: bool) -> None:
    rope = RopeSpec(FREQUENCIES[:8], neox, magnitude=1.3)
    spec = LatentAttentionSpec(4, 32, 16, 16, 64, 0.25, NormSpec("rms", 1e-5), rope)
    random = np.random.default_rng(3)
    rows = random.standard_normal((END, 80)).astype(np.float32)
    remaining = np.sort(random.choice(END, 70, replace=False))
    shifted, expected = (LatentCache.allocate(spec, END, kind) for _ in range(2))

    def with_rope(given: npt.NDArray[np.float32]) -> npt.NDArray[np.floating]:
        tails = apply_rope(given[:, None, 64:], rope, 0)[:, 0]
        return np.concatenate([given[:, :64], tails], axis=1)

    shifted.write(0, with_rope(rows))
    evicted = np.setdiff1d(np.arange(END), remaining)
    LatentAttentionState(spec, shifted).evict(evicted, END)
    expected.write(0, with_rope(rows[remaining]))
    actual, wanted = (cache.read(0, 70) for cache in (shifted, expected))
    np.testing.assert_array_equal(actual[:, :64], wanted[:, :64])
    tails, wanted_tails = actual[:, 64:], wanted[:, 64:]
    assert np.linalg.norm(tails - wanted_tails) / np.linalg.norm(wanted_tails) < NEAR[kind]
