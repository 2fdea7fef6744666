"""Attention of a prompt over the cache, against the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.caches.cache_formats import hadamard_rows, to_fp8
from edgeinfer_kernels.caches.cache_types import CacheType, element_types
from edgeinfer_kernels.cuda.prefill.flash_attention import AttentionTile, attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.prefill import chunk_words
from edgeinfer_kernels.reference.blocks.attention import attend
from tests.kernels.cuda.attention_inputs import KINDS, DeviceCache, attention_facts

SMALL = AttentionTile(rows=32, positions=16, warps=4, stages=1)


def check(device: str, spec: AttentionSpec, start: int, tokens: int, kind: CacheType = "f16",
          tile: AttentionTile = SMALL, spread: float = 1.0) -> None:  # fmt: skip
    random = np.random.default_rng(start * 1000 + tokens)
    end = start + tokens
    cache = DeviceCache.filled_with_nan(device, spec, end + 5, kind)
    for tensor, elements in zip((cache.keys, cache.values), element_types(kind), strict=True):
        values: Any = random.standard_normal((spec.kv_heads, end, tensor.shape[2])) * spread
        if elements == "fp8":
            values = to_fp8(values)
        elif elements != "f16":
            values = random.integers(
                *((-127, 128) if elements == "q8_0" else (-(2**31), 2**31)), values.shape
            )
        tensor[:, :end] = torch.from_numpy(values).to(tensor)
    for scales in (cache.key_scales, cache.value_scales):
        if scales is not None:
            scales[:, :end] = torch.from_numpy(random.uniform(0.005, 0.03, scales[:, :end].shape)).to(scales)
    q = random.standard_normal((tokens, spec.heads, spec.head_dim)).astype(np.float16)
    out = torch.full((tokens, spec.heads * spec.head_dim), float("nan"), dtype=torch.float16, device=device)
    asking = hadamard_rows(q).astype(np.float16) if element_types(kind)[0] == "q4_0" else q
    words = chunk_words(start, tokens).to(device)
    flash_attention(torch.from_numpy(asking).to(device), cache.args, words, spec, out, tile)
    keys, values = cache.read(end)
    expected = attend(q.astype(np.float64), keys, values, start, spec).reshape(tokens, -1)
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=3e-3, atol=4e-3)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 37), (63, 11), (111, 20), (16, 16)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 80), (7, 1, 32), (2, 2, 96), (8, 2, 16)])
def test_flash_attention_equals_the_reference(
    device: str, heads: int, kv_heads: int, head_dim: int, start: int, tokens: int, kind: CacheType
) -> None:
    check(device, attention_facts(heads, kv_heads, head_dim), start, tokens, kind)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
@pytest.mark.parametrize(("start", "tokens"), [(0, 37), (111, 20), (90, 1)])
def test_a_token_attends_to_its_window_only(device: str, window: int, start: int, tokens: int) -> None:
    check(device, attention_facts(4, 2, 32, window=window), start, tokens)


@pytest.mark.parametrize("window", [1, 15, 16, 40, 500])
@pytest.mark.parametrize(("start", "tokens"), [(0, 37), (111, 20), (90, 1)])
def test_a_token_attends_to_its_chunk_only(device: str, window: int, start: int, tokens: int) -> None:
    check(device, replace(attention_facts(4, 2, 32, window=window), chunked=True), start, tokens)


@pytest.mark.parametrize("window", [0, 9])
def test_scores_are_soft_capped(device: str, window: int) -> None:
    spec = attention_facts(4, 2, 32, soft_cap=5.0, scale=2.0, window=window)
    check(device, spec, 13, 21)
    # far above the cap, where e^2z overflows float32
    check(device, replace(spec, soft_cap=0.5), 13, 21, spread=20.0)


def test_large_scores_neither_overflow_nor_lose_the_maximum(device: str) -> None:
    check(device, attention_facts(2, 1, 64, scale=10.0), 5, 30, spread=5.0)


@pytest.mark.parametrize("capability", [75, 80, 86, 90])
def test_the_tile_of_every_target_holds_whole_groups(capability: int) -> None:
    for head_dim in (32, 64, 80, 128, 256):
        for group in (1, 3, 7, 8, 16, 71):
            tile = attention_tile(head_dim, group, capability)
            assert attention_tile(head_dim, group, capability, quantized=True).positions >= 16
            assert tile.rows >= group
            assert tile.rows & (tile.rows - 1) == 0


def test_the_default_tile_computes_the_same(device: str) -> None:
    check(device, attention_facts(8, 2, 64), 70, 75, tile=attention_tile(64, 4, 75))
