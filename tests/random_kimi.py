"""Metadata and tensors of random model files of Kimi Linear."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.random_hybrids import Hybrid, Model, Shapes
from tests.random_latents import latent_metadata, latent_tensors


def delta_attention(kinds: str, head_dim: int, taps: int = 4, fused: bool = False) -> Hybrid:
    """Kimi Linear: one letter for each layer, k Kimi Delta Attention, a latent attention. `fused`: q, k and v
    of the former are projected by one matrix.
    """

    def metadata(model: Model) -> Mapping[str, Any]:
        return {
            "attention.head_count_kv": np.array([int(kind == "a") for kind in kinds], np.int32),
            "expert_feed_forward_length": model.expert_length,
            "expert_shared_count": model.shared_length // model.expert_length,
            **latent_metadata(model.width),
            "kda.head_dim": head_dim,
            "ssm.conv_kernel": taps,
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        width, own = model.width, model.heads * head_dim
        others = {name: shape for name, shape in shapes.items() if not name.startswith("attn")}
        if kinds[index] == "a":
            return {**others, **latent_tensors(width, model.heads, width)}
        tensors: dict[str, tuple[int, ...]] = {f"attn_{part}.weight": (own, width) for part in "qkv"}
        if fused:
            tensors = {"attn_qkv.weight": (3 * own, width)}
        tensors |= {f"ssm_conv1d_{part}.weight": (1, own, 1, taps) for part in "qkv"}
        tensors |= {f"ssm_{part}_a.weight": (head_dim, width) for part in "fg"}
        tensors |= {f"ssm_{part}_b.weight": (own, head_dim) for part in "fg"}
        return {
            **others,
            **tensors,
            "attn_norm.weight": (width,),
            "ssm_beta.weight": (model.heads, width),
            "ssm_a": (1, 1, model.heads, 1),
            "ssm_dt.bias": (own,),
            "ssm_norm.weight": (head_dim,),
            "attn_output.weight": (width, own),
        }

    return Hybrid(metadata, layer)
