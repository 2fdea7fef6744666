"""Metadata and tensors of the latent attention of random model files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec
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


def latent_layers(query_share: float = 0.0) -> Hybrid:
    """Layers with latent attention whose latent vectors are as long as hidden states; the rank of queries is
    a share of that.
    """

    def metadata(model: Model) -> Mapping[str, Any]:
        length = model.expert_length
        return {
            "attention.head_count_kv": 1,
            "expert_feed_forward_length": length,
            "expert_shared_count": model.shared_length // length,
            **latent_metadata(model.width, int(model.width * query_share)),
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        others = {name: shape for name, shape in shapes.items() if not name.startswith("attn")}
        rank = int(model.width * query_share)
        return {**others, **latent_tensors(model.width, model.heads, model.width, rank)}

    return Hybrid(metadata, layer, is_recurrent=False)


def legacy_layers() -> Hybrid:
    """As `latent_layers`, in older files: W_k and W_v of each head are rows of one tensor."""
    newer = latent_layers()

    def metadata(model: Model) -> Mapping[str, Any]:
        keys = {key: value for key, value in newer.metadata(model).items() if not key.endswith("_mla")}
        lengths = {"attention.key_length": NOPE + ROPE, "attention.value_length": VALUE}
        return {**keys, **lengths, "attention.head_count_kv": model.heads}

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        others = {
            name: shape
            for name, shape in newer.layer(model, index, shapes).items()
            if name not in ("attn_k_b.weight", "attn_v_b.weight")
        }
        return {**others, "attn_kv_b.weight": (model.heads * (NOPE + VALUE), model.width)}

    return Hybrid(metadata, layer, is_recurrent=False)


def without_rope(spec: DecoderSpec) -> DecoderSpec:
    """The same decoder whose latent attention uses no RoPE."""
    layers = []
    for layer in spec.layers:
        blocks = [
            replace(each, block=replace(each.block, rope=None))
            if isinstance(each.block, LatentAttentionSpec)
            else each
            for each in layer.blocks
        ]
        layers.append(LayerSpec(tuple(blocks)))
    return replace(spec, layers=tuple(layers))
