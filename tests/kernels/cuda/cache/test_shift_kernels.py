"""A shifted device cache equals one with all later tokens written at their new positions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_types import CacheType, element_types
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.prefill.prefill import chunk_words
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache as LayerCache
from edgeinfer_kernels.cuda.weights.rope_tables import rope_table
from tests.kernels.cuda.attention_inputs import KINDS, DeviceCache, attention_facts

END, POSITIONS = 52, 56
NEAR = {"f16": 2e-3, "fp8": 0.06, "q8_0": 0.02, "q4_0": 0.2}
"""Relative to the keys: each is rounded once more."""
ROPES = {
    "all": RopeSpec(tuple(0.8**i for i in range(20)), neox=True, magnitude=1.3),
    "some, scaled": RopeSpec((1.0, 0.31, 0.3 / 8), neox=False),
    "none": None,
}


def filled(device: str, spec: AttentionSpec, kind: CacheType, positions: list[int]) -> DeviceCache:
    """The cache with these of some random tokens."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((END, 4 * spec.head_dim)).astype(np.float32)[positions]
    cache = DeviceCache.filled_with_nan(device, spec, POSITIONS, kind)
    qkv = torch.from_numpy(np.tile(rows, (1, 2))[:, : 6 * spec.head_dim].copy()).to(device)
    projected = ProjectedHeads(qkv, torch.ones(len(positions), device=device))
    queries = torch.empty(len(positions), 2, spec.head_dim, dtype=torch.float16, device=device)
    words = chunk_words(0, len(positions)).to(device)
    rope_append(projected, table_of(device, spec), spec, words, queries, cache.args)
    return cache


def table_of(device: str, spec: AttentionSpec) -> torch.Tensor:
    return torch.from_numpy(rope_table(spec.rope, spec.head_dim, POSITIONS)).to(device)


def shift_cache(device: str, cache: DeviceCache, spec: AttentionSpec, keep: int, dropped: int) -> None:
    nothing = torch.empty(0, device=device)
    scales = [nothing if each is None else each for each in (cache.key_scales, cache.value_scales)]
    tensors: Any = cache.keys, scales[0], cache.values, scales[1]
    heads = ShiftedHeads(spec.head_dim, spec.head_dim, spec.rope is not None)
    shift_context(LayerCache(*tensors), table_of(device, spec), heads, keep, dropped, END)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rope", "keep", "dropped"),
    [("all", 5, 16), ("some, scaled", 0, 32), ("none", 3, 16)],
)
def test_keys_are_rotated_back_and_values_are_moved(
    device: str, kind: CacheType, rope: str, keep: int, dropped: int
) -> None:
    spec = replace(attention_facts(2, 2, 40), rope=ROPES[rope])
    rest = [*range(keep), *range(keep + dropped, END)]
    cache, expected = (filled(device, spec, kind, tokens) for tokens in ([*range(END)], rest))
    shift_cache(device, cache, spec, keep, dropped)
    (keys, values), (expected_keys, expected_values) = (each.read(len(rest)) for each in (cache, expected))
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(keys[:, :keep], expected_keys[:, :keep])
    error = np.linalg.norm(keys - expected_keys) / np.linalg.norm(expected_keys)
    assert error < NEAR[element_types(kind)[0]] if spec.rope else error == 0
