"""Metadata and tensors of the latent attention of random model files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.random_hybrids import Hybrid, Model, Shapes

NOPE, ROPE, VALUE = 32, 16, 48


def latent_metadata(latent: int, query_rank: int = 0) -> dict[str, Any]:
    """The keys of latent attention."""
    return {
        "attention.key_length": latent + ROPE,
        "attention.value_length": latent,
        "attention.key_length_mla": NOPE + ROPE,
        "attention.value_length_mla": VALUE,
        "attention.kv_lora_rank": latent,
        "attention.q_lora_rank": query_rank,
        "rope.dimension_count": ROPE,
    }


def latent_tensors(width: int, heads: int, latent: int, query_rank: int = 0) -> Shapes:
    """The tensors of latent attention in a layer."""
    queries = heads * (NOPE + ROPE)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_kv_a_mqa.weight": (latent + ROPE, width),
        "attn_kv_a_norm.weight": (latent,),
        "attn_k_b.weight": (heads, latent, NOPE),
        "attn_v_b.weight": (heads, VALUE, latent),
        "attn_output.weight": (width, heads * VALUE),
    }
    if not query_rank:
        return {**shapes, "attn_q.weight": (queries, width)}
    return {
        **shapes,
        "attn_q_a.weight": (query_rank, width),
        "attn_q_a_norm.weight": (query_rank,),
        "attn_q_b.weight": (queries, query_rank),
    }


def expert_metadata(model: Model) -> dict[str, int]:
    """The keys of experts with shared ones of their length."""
    length = model.expert_length
    return {"expert_feed_forward_length": length, "expert_shared_count": model.shared_length // length}


def latent_layers(query_share: float = 0.0) -> Hybrid:
    """Layers with latent attention whose latent vectors are as long as hidden states; the rank of queries is
    a share of that.
    """

    def metadata(model: Model) -> Mapping[str, Any]:
        return {
            "attention.head_count_kv": 1,
            **expert_metadata(model),
            **latent_metadata(model.width, int(model.width * query_share)),
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        others = {name: shape for name, shape in shapes.items() if not name.startswith("attn")}
        rank = int(model.width * query_share)
        return {**others, **latent_tensors(model.width, model.heads, model.width, rank)}

    return Hybrid(metadata, layer)


def delta_attention(kinds: str, head_dim: int, taps: int = 4, fused: bool = False) -> Hybrid:
    """Kimi Linear: one letter for each layer, k Kimi Delta Attention, a latent attention. `fused`: q, k and v
    of the former are projected by one matrix.
    """

    def metadata(model: Model) -> Mapping[str, Any]:
        return {
            "attention.head_count_kv": np.array([int(kind == "a") for kind in kinds], np.int32),
            **expert_metadata(model),
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
