"""Queries, keys and values for the attention tests, and the cache of the device read back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgeinfer_kernels.specification import AttentionSpecification, NormSpecification, RopeSpecification

NORM = NormSpecification("rms", 1e-5)


def attention_facts(heads: int, kv_heads: int, head_dim: int, **more: Any) -> AttentionSpecification:
    rope = RopeSpecification(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)), halves=True)
    facts = {"scale": head_dim**-0.5, "norm": NORM, "rope": rope} | more
    return AttentionSpecification(heads, kv_heads, head_dim, **facts)


@dataclass
class DeviceCache:
    """A layer's cache, poisoned where nothing was written."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None

    @classmethod
    def poisoned(
        cls, device: str, facts: AttentionSpecification, positions: int, quantised: bool
    ) -> "DeviceCache":
        shape = (facts.kv_heads, positions, facts.head_dim)
        if not quantised:
            nan = float("nan")
            return cls(
                *(torch.full(shape, nan, dtype=torch.float16, device=device) for _ in "kv"), None, None
            )
        groups = (facts.kv_heads, positions, -(-facts.head_dim // 32))
        whole = [torch.full(shape, 77, dtype=torch.int8, device=device) for _ in "kv"]
        scales = [torch.full(groups, float("nan"), dtype=torch.float16, device=device) for _ in "kv"]
        return cls(whole[0], whole[1], scales[0], scales[1])

    def read(self, end: int) -> tuple[Any, Any]:
        """Keys and values (kv_heads, end, head_dim) float64 of the first `end` positions."""
        pairs = ((self.keys, self.key_scales), (self.values, self.value_scales))
        found = []
        for tensor, scales in pairs:
            array = tensor.double().cpu().numpy()
            if scales is not None:
                spread = np.repeat(scales.double().cpu().numpy(), 32, axis=2)[..., : array.shape[2]]
                array = array * spread
            found.append(array[:, :end])
        return found[0], found[1]
