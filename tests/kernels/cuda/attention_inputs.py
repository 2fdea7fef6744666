"""Queries, keys and values for the attention tests, and the device cache as arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_formats import from_fp8, hadamard_rows, rounded_to_nibbles
from edgeinfer_kernels.caches.cache_types import (
    SCALED_TYPES,
    CacheType,
    ElementType,
    element_types,
    has_recent,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs
from edgeinfer_kernels.cuda.weights.device_block import CACHE_ELEMENTS

NORM = NormSpec("rms", 1e-5)
KINDS: tuple[CacheType, ...] = ("f16", "fp8", "q8_0", "q4_0", "q8_0/q4_0")
BYTE = 77
"""The value of unwritten cache elements."""


def attention_facts(heads: int, kv_heads: int, head_dim: int, **more: Any) -> AttentionSpec:
    rope = RopeSpec(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)), neox=True)
    spec = {"scale": head_dim**-0.5, "norm": NORM, "rope": rope} | more
    return AttentionSpec(heads, kv_heads, head_dim, **spec)


def slots_of(kind: CacheType, positions: int) -> torch.Tensor | None:
    """The slots of recent positions for a cache of this type, without memory; None: it has none."""
    shape = (positions // PAGE,)
    return torch.empty(shape, dtype=torch.int32, device="meta") if has_recent(kind) else None


def spread(scales: Any, width: int) -> Any:
    """Scales of groups for each of `width` elements."""
    return np.repeat(scales, 32, axis=-1)[..., :width]


@dataclass
class DeviceCache:
    """A layer's cache, filled with NaN where nothing was written."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    head_dim: int

    @classmethod
    def filled_with_nan(
        cls, device: str, spec: AttentionSpec, positions: int, kind: CacheType
    ) -> "DeviceCache":
        tensors = []
        for elements in element_types(kind):
            shape = (spec.kv_heads, positions, spec.head_dim)
            value = float("nan") if elements == "f16" else BYTE
            if elements == "q4_0":
                shape = (*shape[:2], -(-spec.head_dim // 8))
            dtype = CACHE_ELEMENTS[elements]
            groups = (*shape[:2], -(-spec.head_dim // 32))
            scales = torch.full(groups, float("nan"), dtype=torch.float16, device=device)
            tensors.append(torch.full(shape, value, dtype=dtype, device=device))
            tensors.append(scales if elements in SCALED_TYPES else None)
        return cls(tensors[0], tensors[2], tensors[1], tensors[3], spec.head_dim)

    @property
    def args(self) -> CacheArgs:
        """The arguments of prompt kernels."""
        return CacheArgs(self.keys, self.key_scales, self.values, self.value_scales, self.keys.shape[1])

    def read(self, end: int) -> tuple[Any, Any]:
        """Keys and values (kv_heads, end, head_dim) float64 of the first `end` positions."""
        return self._read(self.keys, self.key_scales, end), self._read(self.values, self.value_scales, end)

    def _read(self, tensor: torch.Tensor, scales: torch.Tensor | None, end: int) -> Any:
        array = tensor[:, :end].cpu().numpy()
        if scales is None:
            return (from_fp8(array) if array.dtype == np.uint8 else array).astype(np.float64)
        wide = scales[:, :end].double().cpu().numpy()
        if array.dtype == np.int8:
            return array * spread(wide, self.head_dim)
        indices = [index // 2 * 4 + index % 2 * 16 for index in range(8)]
        codes = np.stack([array >> index & 15 for index in indices], -1).reshape(*array.shape[:-1], -1) - 8
        codes = codes[..., : self.head_dim]
        return hadamard_rows(codes * spread(wide, self.head_dim)).astype(np.float64)


def assert_rounded(kind: ElementType, written: Any, expected: Any) -> None:
    """A cache holds the written values within the rounding of its type."""
    if kind in ("f16", "fp8"):
        rtol, atol = (1e-3, 2e-3) if kind == "f16" else (2**-4 + 1e-3, 2**-9)
        np.testing.assert_allclose(written, expected, rtol=rtol, atol=atol)
        return
    if kind == "q4_0":
        written, expected = hadamard_rows(written), hadamard_rows(expected)
        steps = spread(np.abs(rounded_to_nibbles(expected)[1].astype(np.float64)), expected.shape[-1])
    else:
        groups = np.split(expected, range(32, expected.shape[-1], 32), axis=-1)
        steps = np.concatenate([np.abs(g).max(-1, keepdims=True) / 127 + 0 * g for g in groups], axis=-1)
    # The element furthest from 0 may have the sign for which four bits have one code less.
    over = 1.02 if kind == "q4_0" else 0.58
    assert (np.abs(written - expected) <= over * steps + 1e-5).all()
    if kind == "q4_0":
        assert np.mean(np.abs(written - expected) <= 0.52 * steps + 1e-5) > 0.95
