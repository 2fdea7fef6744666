"""RoPE on projected rows, and the cache append, against the reference."""

from typing import Any, Literal

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.caches.cache_formats import hadamard_rows
from edgeinfer_kernels.caches.cache_types import CacheType, element_types
from edgeinfer_kernels.cuda.prefill.prefill import chunk_words
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.reference.blocks.attention import apply_rope
from edgeinfer_kernels.reference.step import normalize
from tests.kernels.cuda.attention_inputs import BYTE, KINDS, DeviceCache, assert_rounded, attention_facts

POSITIONS = 24
START = 5
TOKENS = 3


def expected_heads(
    spec: AttentionSpec, row: Any, bias: Any, q_norm: Any, k_norm: Any
) -> tuple[Any, Any, Any]:
    q_end, k_end = spec.heads * spec.head_dim, (spec.heads + spec.kv_heads) * spec.head_dim
    row = row + bias
    parts = []
    for part, norm in ((row[:, :q_end], q_norm), (row[:, q_end:k_end], k_norm)):
        if spec.qk_norm == "row":
            part = normalize(part, spec.norm, norm)
        part = part.reshape(len(row), -1, spec.head_dim)
        if spec.qk_norm == "head":
            part = normalize(part, spec.norm, norm)
        parts.append(apply_rope(part, spec.rope, START))
    return parts[0], parts[1], row[:, k_end:].reshape(len(row), -1, spec.head_dim)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qk_norm", ["none", "head", "row"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 2, 80), (3, 3, 96), (8, 1, 64), (4, 2, 16), (2, 2, 128)]
)
def test_rope_is_applied_to_queries_and_keys_and_values_are_appended(
    device: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: Literal["none", "head", "row"],
    kind: CacheType,
) -> None:
    norm = NormSpec("layer" if heads == 3 else "rms", 1e-5)
    spec = attention_facts(heads, kv_heads, head_dim, qk_norm=qk_norm, norm=norm)
    assert spec.rope is not None
    random = np.random.default_rng(heads)
    width = (heads + 2 * kv_heads) * head_dim
    qkv, bias = (random.standard_normal(shape).astype(np.float32) for shape in ((TOKENS, width), width))
    scales = np.array([1, 2, 4], np.float32)
    lengths = (head_dim, head_dim) if qk_norm == "head" else (heads * head_dim, kv_heads * head_dim)
    q_norm, k_norm = (random.standard_normal(length).astype(np.float32) for length in lengths)
    cache = DeviceCache.filled_with_nan(device, spec, POSITIONS, kind)
    queries = torch.full((TOKENS, heads, head_dim), float("nan"), dtype=torch.float16, device=device)
    table = spec.rope.table(0, POSITIONS)
    there = [torch.from_numpy(array).to(device) for array in (qkv, scales, bias, q_norm, k_norm, table)]
    words = chunk_words(START, TOKENS).to(device)
    rope_append(ProjectedHeads(*there[:-1]), there[-1], spec, words, queries, cache.args)
    q, k, v = expected_heads(spec, qkv.astype(np.float64) * scales[:, None], bias, q_norm, k_norm)
    q, rounding = (hadamard_rows(q), 8e-3) if element_types(kind)[0] == "q4_0" else (q, 2e-3)
    np.testing.assert_allclose(queries.cpu().numpy(), q, rtol=1e-3, atol=rounding)
    for result, expected, elements in zip(cache.read(POSITIONS), (k, v), element_types(kind), strict=True):
        assert_rounded(elements, result[:, START : START + TOKENS], expected.swapaxes(0, 1))
    assert_untouched(cache)


def assert_untouched(cache: DeviceCache) -> None:
    others = [position for position in range(POSITIONS) if not START <= position < START + TOKENS]
    for tensor in (cache.keys, cache.values):
        left = tensor[:, others]
        assert torch.isnan(left).all() if left.is_floating_point() else (left == BYTE).all()
    for scales in (cache.key_scales, cache.value_scales):
        assert scales is None or torch.isnan(scales[:, others]).all()


def test_zeros_are_quantized_to_zeros_and_large_values_are_finite(device: str) -> None:
    spec = attention_facts(1, 1, 64)
    assert spec.rope is not None
    qkv = np.zeros((2, 192), np.float32)
    qkv[1, 128:] = 1e6
    table = torch.from_numpy(spec.rope.table(0, 4)).to(device)
    queries = torch.empty(2, 1, 64, dtype=torch.float16, device=device)
    for kind, held in zip(KINDS, (65504.0, 448.0, 1e6, 65504.0, 65504.0), strict=True):
        cache = DeviceCache.filled_with_nan(device, spec, 4, kind)
        projected = ProjectedHeads(torch.from_numpy(qkv).to(device), torch.ones(2, device=device))
        rope_append(projected, table, spec, chunk_words(0, 2).to(device), queries, cache.args)
        keys, values = cache.read(2)
        assert (keys == 0).all()
        assert (values[:, 0] == 0).all()
        np.testing.assert_allclose(values[:, 1], held, rtol=1e-3)
