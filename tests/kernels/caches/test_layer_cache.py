"""Rounding and bytes of a layer's cache."""

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.caches.cache_formats import (
    from_fp8,
    hadamard_rows,
    packed_in_groups,
    packed_in_pairs,
    rotation_block,
    rounded_to_nibbles,
    to_fp8,
    unpacked_groups,
    unpacked_pairs,
    widened,
)
from edgeinfer_kernels.caches.cache_types import CacheType, element_types
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_quant_formats import decode

RANDOM = np.random.default_rng(9)
KINDS: tuple[CacheType, ...] = ("f32", "f16", "fp8", "q8_0", "q4_0", "q8_0/q4_0", "f16/fp8", "q4_0/f16")
WITHIN = {"f32": 0.0, "f16": 1e-3, "fp8": 0.04, "q8_0": 0.01, "q4_0": 0.12}
"""The root of the mean squared error of normally distributed elements."""


def attention(head_dim: int) -> AttentionSpec:
    return AttentionSpec(4, 2, head_dim, 0.25, NormSpec("rms", 1e-5), None)


def rows(tokens: int, head_dim: int) -> npt.NDArray[np.float32]:
    return RANDOM.standard_normal((tokens, 2, head_dim)).astype(np.float32)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 12, 15, 48, 64, 80, 128])
def test_cached_values_are_restored_within_rounding(kind: CacheType, head_dim: int) -> None:
    cache = LayerCache.allocate(attention(head_dim), 100, kind)
    keys, values = rows(71, head_dim), rows(71, head_dim)
    cache.write(0, keys[:50], values[:50])
    cache.write(50, keys[50:], values[50:])
    for result, expected, element in zip(
        cache.read(71, head_dim), (keys, values), element_types(kind), strict=True
    ):
        assert result.shape == (2, 71, head_dim)
        assert np.sqrt(np.mean((result - expected.swapaxes(0, 1)) ** 2)) <= WITHIN[element]


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "context"), [(8, 1), (48, 100), (64, 4096), (80, 63), (128, 2000)])
def test_planned_bytes_equal_allocated_bytes(kind: CacheType, head_dim: int, context: int) -> None:
    spec = attention(head_dim)
    taken = sum(part.nbytes for part in LayerCache.allocate(spec, context, kind).arrays())
    assert LayerCache.nbytes_for(spec, context, kind) == taken


def test_keys_and_values_have_their_own_types() -> None:
    spec = attention(128)
    cache = LayerCache.allocate(spec, 4096, "q8_0/q4_0")
    assert (cache.key_type, cache.value_type) == ("q8_0", "q4_0")
    both = sum(LayerCache.nbytes_for(spec, 4096, kind) for kind in ("q8_0", "q4_0"))
    assert 2 * LayerCache.nbytes_for(spec, 4096, "q8_0/q4_0") == both


@pytest.mark.parametrize("kind", ["q9", "f16/", "/f16", "f16/q8_0/q4_0", ""])
def test_other_names_are_no_cache_types(kind: str) -> None:
    with pytest.raises(ValueError, match="no cache type"):
        element_types(kind)


def test_fp8_equals_the_format_of_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256).astype(np.uint8)
    codes = codes[codes & 0x7F != 0x7F]  # not the two NaN
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(from_fp8(codes), expected)
    assert np.array_equal(to_fp8(expected), codes)
    numbers = (np.exp2(RANDOM.uniform(-12, 8.7, 5000)) * RANDOM.choice([-1, 1], 5000)).astype(np.float32)
    rounded = torch.from_numpy(numbers).to(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(from_fp8(to_fp8(numbers)), rounded)
    assert from_fp8(to_fp8(np.array([1e9, -np.inf], np.float32))).tolist() == [448, -448]


def test_a_four_bit_cache_uses_four_and_a_half_bits_per_value() -> None:
    of_floats, of_nibbles = (LayerCache.nbytes_for(attention(128), 4096, kind) for kind in ("f16", "q4_0"))
    assert of_nibbles * 16 == of_floats * 4.5


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_positions_are_copied_with_their_scales(kind: CacheType) -> None:
    cache = LayerCache.allocate(attention(48), 192, kind)
    cache.write(0, rows(192, 48), rows(192, 48))
    before = [np.array(part) for part in cache.read(192, 48)]
    cache.copy(14, 35, 20)
    for old, new in zip(before, cache.read(192, 48), strict=True):
        old[:, 35:55] = old[:, 14:34].copy()
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(("head_dim", "block"), [(128, 128), (96, 32), (80, 16), (24, 8), (7, 1)])
def test_a_head_is_rotated_by_the_largest_power_of_two_that_divides_it(head_dim: int, block: int) -> None:
    assert rotation_block(head_dim) == block
    x = RANDOM.standard_normal((3, head_dim))
    matrix = hadamard_rows(np.eye(head_dim))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    assert np.count_nonzero(matrix) == head_dim * block
    np.testing.assert_allclose(hadamard_rows(x), x @ matrix, atol=1e-5)
    np.testing.assert_allclose(hadamard_rows(hadamard_rows(x)), x, atol=1e-5)


@pytest.mark.parametrize("case", ["normal", "zeros", "huge", "tiny", "equal", "negative"])
def test_four_bit_values_equal_q4_0_blocks(case: str) -> None:
    x = RANDOM.standard_normal((5, 64)).astype(np.float32)
    factors = {"zeros": 0.0, "huge": 1e9, "tiny": 1e-9}
    x = {"equal": np.full_like(x, 3), "negative": -np.abs(x)}.get(case, x * np.float32(factors.get(case, 1)))
    codes, scales = rounded_to_nibbles(x)
    packed = packed_in_groups(codes).reshape(-1, 16)
    blocks = np.concatenate([scales.reshape(-1, 1).view(np.uint8), packed], axis=1)
    np.testing.assert_array_equal(decode(blocks.reshape(-1), "Q4_0").reshape(x.shape), widened(codes, scales))
    if case not in ("huge", "tiny"):
        assert np.abs(widened(codes, scales) - x).max() <= 1.01 * np.abs(scales.astype(np.float32)).max()


def test_packed_codes_round_trip_at_any_length() -> None:
    codes = RANDOM.integers(-8, 8, (3, 80)).astype(np.int8)
    np.testing.assert_array_equal(unpacked_pairs(packed_in_pairs(codes)), codes)
    np.testing.assert_array_equal(unpacked_groups(packed_in_groups(codes), 80), codes)
