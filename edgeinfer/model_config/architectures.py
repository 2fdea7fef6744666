"""The supported architectures, one table row each; values of the file's metadata are added in
`model_config.py`.
"""

from typing import Any

from edgeinfer.model_config.architecture import Architecture
from edgeinfer.model_config.recurrent_blocks import (
    gated_delta_net,
    kimi_delta_attention,
    mamba,
    mamba2,
    repeated_delta_net,
    rwkv7_channel_mix,
    rwkv7_time_mix,
    short_convolution,
)

_QWEN35: dict[str, Any] = {
    "rope_neox": True,
    "qk_norm": "head",
    "feed_forward_norm": "post_attention_norm",
    "recurrent": gated_delta_net,
    "recurrent_layers": "interval",
    "attention_gate": True,
}

_NEMOTRON_H: dict[str, Any] = {
    "activation": "relu_squared",
    "gated": False,
    "recurrent": mamba2,
    "single_blocks": True,
    "rope": "never",
}

_BIASED_EXPERTS: dict[str, Any] = {
    "experts": "always",
    "gating": None,
    "expert_weights_normalized": None,
    "expert_selection_bias": "sigmoid",
    "expert_groups": True,
    "shared_expert": "plain",
}


ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(activation="relu_squared", gated=False),
    "bailingmoe": Architecture(experts="always", expert_weights_normalized=None, shared_expert="plain"),
    "bailingmoe2": Architecture(rope_neox=True, qk_norm="head", **_BIASED_EXPERTS, shared_length_of_one=True),
    "cohere2": Architecture(
        norm="layer",
        parallel_feed_forward=True,
        logits_multiplied=True,
        window_pattern=4,
        rope_in_windows_only=True,
    ),
    "command-r": Architecture(norm="layer", parallel_feed_forward=True, logits_multiplied=True),
    "deepseek": Architecture(experts="always", expert_weights_normalized=False, shared_expert="plain"),
    "deepseek2": Architecture(
        experts="always",
        gating=None,
        default_gating="softmax",
        expert_weights_normalized=None,
        expert_selection_bias="sigmoid",
        expert_groups=True,
        shared_expert="plain",
        latent_attention=True,
    ),
    "dots1": Architecture(rope_neox=True, qk_norm="head", **_BIASED_EXPERTS),
    "ernie4_5": Architecture(),
    "ernie4_5-moe": Architecture(experts="by_router", expert_selection_bias="always", shared_expert="plain"),
    "exaone": Architecture(rope_neox=True),
    "exaone-moe": Architecture(
        rope_neox=True,
        qk_norm="head",
        window_pattern=4,
        default_window=128,
        rope_in_windows_only=True,
        **_BIASED_EXPERTS,
    ),
    "exaone4": Architecture(
        rope_neox=True,
        pre_norm=False,
        post_norm=True,
        qk_norm="head",
        window_pattern=4,
        rope_in_windows_only=True,
    ),
    "falcon-h1": Architecture(rope_neox=True, recurrent=mamba2, recurrent_layers="parallel"),
    "gemma": Architecture(rope_neox=True, activation="gelu", embedding_scale_by_width=True),
    "gemma2": Architecture(
        rope_neox=True,
        activation="gelu",
        embedding_scale_by_width=True,
        post_norm=True,
        window_pattern=2,
        default_window=4096,
        default_attention_soft_cap=50.0,
        default_logit_soft_cap=30.0,
        query_scale_by_heads_at=46,
    ),
    "gemma3": Architecture(
        rope_neox=True,
        activation="gelu",
        embedding_scale_by_width=True,
        post_norm=True,
        qk_norm="head",
        window_pattern=6,
        window_rope_base=10000.0,
        window_rope_unscaled=True,
        query_scale_by_heads_at=62,
    ),
    "glm4": Architecture(post_norm=True, rope_neox_with_sections=True),
    "glm4moe": Architecture(
        rope_neox=True,
        qk_norm="head",
        qk_norm_optional=True,
        feed_forward_norm="post_attention_norm",
        **_BIASED_EXPERTS,
        default_gating="sigmoid",
    ),
    "gpt-oss": Architecture(
        rope_neox=True,
        activation="clamped_swiglu",
        window_pattern=2,
        sinks=True,
        feed_forward_norm="post_attention_norm",
        experts="always",
        gating="softmax_of_selected",
        expert_weights_normalized=False,
    ),
    "granite": Architecture(),
    "granitehybrid": Architecture(experts="maybe", shared_expert="plain", recurrent=mamba2, rope="finetuned"),
    "granitemoe": Architecture(experts="maybe", shared_expert="plain"),
    "hunyuan-dense": Architecture(rope_neox=True, qk_norm="head", qk_norm_after_rope=True),
    "hunyuan-moe": Architecture(
        rope_neox=True, qk_norm="head", qk_norm_after_rope=True, experts="always", shared_expert="plain"
    ),
    "internlm2": Architecture(),
    "jamba": Architecture(
        experts="by_router", expert_weights_normalized=False, recurrent=mamba, rope="never"
    ),
    "kimi-linear": Architecture(
        experts="always",
        gating=None,
        expert_selection_bias="sigmoid",
        shared_expert="plain",
        recurrent=kimi_delta_attention,
        latent_attention=True,
        rope="never",
    ),
    "lfm2": Architecture(
        rope_neox=True, qk_norm="head", recurrent=short_convolution, output_norm="token_embd_norm"
    ),
    "lfm2moe": Architecture(
        rope_neox=True,
        qk_norm="head",
        recurrent=short_convolution,
        output_norm="token_embd_norm",
        experts="always",
        gating=None,
        expert_selection_bias="sigmoid",
    ),
    "llama": Architecture(experts="maybe"),
    "maincoder": Architecture(qk_norm="head", qk_norm_after_rope=True),
    "mamba": Architecture(recurrent=mamba, single_blocks=True, rope="never"),
    "mamba2": Architecture(recurrent=mamba2, single_blocks=True, rope="never"),
    "minimax-m2": Architecture(
        rope_neox=True, qk_norm="row", experts="always", gating=None, expert_selection_bias="sigmoid"
    ),
    "mistral3": Architecture(experts="maybe", query_temperature=True),
    "nemotron": Architecture(rope_neox=True, norm="layer", activation="relu_squared", gated=False),
    "nemotron_h": Architecture(**_NEMOTRON_H),
    "nemotron_h_moe": Architecture(
        **_NEMOTRON_H,
        experts="always",
        latent_experts=True,
        gating="sigmoid",
        expert_weights_normalized=None,
        expert_selection_bias="sigmoid",
        expert_length_by_share=True,
        shared_expert="plain",
    ),
    "olmo": Architecture(norm="layer", norm_weights=False),
    "olmo2": Architecture(
        rope_neox=True,
        pre_norm=False,
        post_norm=True,
        qk_norm="row",
        window_pattern=4,
        window_rope_unscaled=True,
    ),
    "olmoe": Architecture(rope_neox=True, qk_norm="row", experts="always", expert_weights_normalized=False),
    "orion": Architecture(rope_neox=True, norm="layer"),
    "pangu-embedded": Architecture(rope_neox=True),
    "phi3": Architecture(rope_neox=True),
    "qwen2": Architecture(rope_neox=True),
    "qwen2moe": Architecture(
        rope_neox=True,
        experts="always",
        expert_weights_normalized=False,
        expert_length_by_share=True,
        shared_expert="gated",
    ),
    "qwen3": Architecture(rope_neox=True, qk_norm="head"),
    "qwen35": Architecture(**_QWEN35),
    "qwen35moe": Architecture(**_QWEN35, experts="always", shared_expert="gated"),
    "qwen3moe": Architecture(rope_neox=True, qk_norm="head", experts="always", expert_length_by_share=True),
    "qwen3next": Architecture(
        **{**_QWEN35, "recurrent": repeated_delta_net}, experts="always", shared_expert="gated"
    ),
    "rwkv7": Architecture(
        norm="layer",
        feed_forward_norm="attn_norm_2",
        recurrent=rwkv7_time_mix,
        recurrent_feed_forward=rwkv7_channel_mix,
        embedding_norm=True,
        rope="never",
    ),
    "seed_oss": Architecture(rope_neox=True, feed_forward_norm="post_attention_norm"),
    "smallthinker": Architecture(
        rope_neox=True,
        activation="relu",
        window_pattern=4,
        global_layer_first=True,
        rope_in_windows_only=True,
        experts="always",
        gating=None,
        pre_attention_router=True,
    ),
    "smollm3": Architecture(rope_skipped_every=4),
    "stablelm": Architecture(rope_neox=True, norm="layer"),
    "starcoder2": Architecture(rope_neox=True, norm="layer", activation="gelu", gated=False),
}
"""GGUF `general.architecture` -> its properties."""
