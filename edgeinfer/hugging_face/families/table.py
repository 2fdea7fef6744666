"""The table of families: class name in config.json -> names, settings and layouts."""

from dataclasses import replace
from typing import Any

from edgeinfer.hugging_face.families.family import Family
from edgeinfer.hugging_face.families.names import (
    ATTENTION,
    ENDS,
    EXPERTS,
    FEED_FORWARD,
    FOUR_NORMS,
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    NORMS,
    OUTER_NORMS,
    QK_NORMS,
    SHARED_EXPERT,
    UP_DOWN,
)

GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""GELU in its tanh form."""
_NOT_ALL_DENSE: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_SOFT_CAPS = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
_GRANITE_SCALES = {
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "logit_scale": ("logits_scaling",),
}
_IMAGES = (
    "vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.",
)  # fmt: skip
_LLAMA = Family("llama", permuted=True)
_QWEN2 = Family("qwen2", required={"use_sliding_window": (False,)})
_GEMMA = Family("gemma", norm_offset=1.0, activations=(*GELU, "gelu"))
_GEMMA2 = Family(
    "gemma2",
    layer={**FOUR_NORMS, **ATTENTION, **FEED_FORWARD},
    norm_offset=1.0,
    activations=GELU,
    settings=_SOFT_CAPS,
    windows=2,
)
_GEMMA3 = replace(
    _GEMMA2,
    architecture="gemma3",
    layer={**FOUR_NORMS, **ATTENTION, **QK_NORMS, **FEED_FORWARD},
    settings={},
    required={"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
    windows=6,
)
_GRANITE = Family("granite", permuted=True, settings=_GRANITE_SCALES)
_OLMO2 = Family("olmo2", layer={**OUTER_NORMS, **ATTENTION, **QK_NORMS, **FEED_FORWARD})
_COHERE = Family(
    "command-r",
    layer={"input_layernorm": "attn_norm", **ATTENTION, **FEED_FORWARD},
    norm="layer",
    settings={"logit_scale": ("logit_scale",)},
    required={"use_qk_norm": (False,)},
)
_PHI2_LAYER = {
    "input_layernorm": "attn_norm",
    **ATTENTION,
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_GPT_NEOX_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GLM4_LAYER = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    **ATTENTION,
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": Family(
        "arcee", layer={**NORMS, **ATTENTION, **UP_DOWN}, permuted=True, activations=("relu2",)
    ),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(_COHERE, architecture="cohere2", windows=4),
    "Ernie4_5ForCausalLM": Family("ernie4_5"),
    "Exaone4ForCausalLM": Family(
        "exaone4", layer={**OUTER_NORMS, **ATTENTION, **QK_NORMS, **FEED_FORWARD}, windows=4
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        ends={"transformer.wte": "token_embd", "transformer.wpe": "position_embd",
              "transformer.ln_f": "output_norm", "lm_head": "output"},
        layer=_GPT2_LAYER,
        prefix="transformer.h.",
        norm="layer",
        activations=GELU,
        layouts=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
        required={"scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,)},
    ),
    "GPTNeoXForCausalLM": Family(
        "gptneox",
        ends={"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm",
              "embed_out": "output"},
        layer=_GPT_NEOX_LAYER,
        prefix="gpt_neox.layers.",
        norm="layer",
        activations=(*GELU, "gelu"),
        layouts={"attn_qkv": "query_key_value_by_head"},
        settings={"use_parallel_residual": ("use_parallel_residual",)},
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, skipped=_IMAGES),
    "Gemma3TextModel": _GEMMA3,
    "Glm4ForCausalLM": Family("glm4", layer=_GLM4_LAYER),
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": replace(
        _GRANITE,
        architecture="granitemoe",
        layer={**NORMS, **ATTENTION, **GRANITE_EXPERTS},
        layouts={"ffn_gate_exps": "gate_up_experts"},
    ),
    "LlamaForCausalLM": _LLAMA,
    "MambaForCausalLM": Family(
        "mamba",
        ends={"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"},
        layer={
            "norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d",
            "mixer.x_proj": "ssm_x", "mixer.dt_proj": "ssm_dt", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d",
            "mixer.out_proj": "ssm_out",
        },
        prefix="backbone.layers.",
        layouts={"ssm_a": "negative_exp", "ssm_conv1d": "squeezed"},
        settings={
            "ssm.conv_kernel": ("conv_kernel",), "ssm.inner_size": ("intermediate_size",),
            "ssm.state_size": ("state_size",), "ssm.time_step_rank": ("time_step_rank",),
            "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon",),
        },
        fixed={"feed_forward_length": 0, "attention.head_count": 0, "context_length": 1 << 20},
    ),
    "MistralForCausalLM": replace(_LLAMA, window_caps_context=True),
    "MixtralForCausalLM": replace(
        _LLAMA, layer={**NORMS, **ATTENTION, **MIXTRAL_EXPERTS}, window_caps_context=True
    ),
    "NemotronForCausalLM": Family(
        "nemotron",
        layer={**NORMS, **ATTENTION, **UP_DOWN},
        norm="layer",
        norm_offset=1.0,
        activations=("relu2",),
    ),
    "OlmoForCausalLM": Family(
        "olmo",
        norm="layer",
        permuted=True,
        settings={"attention.clamp_kqv": ("clip_qkv",)},
        fixed={"attention.layer_norm_epsilon": 1e-5},
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(_OLMO2, windows=4),
    "OlmoeForCausalLM": Family(
        "olmoe",
        layer={**NORMS, **ATTENTION, **QK_NORMS, **EXPERTS},
        required={"norm_topk_prob": (False,), "clip_qkv": (None,)},
    ),
    "PhiForCausalLM": Family(
        "phi2",
        ends={**ENDS, "model.final_layernorm": "output_norm"},
        layer=_PHI2_LAYER,
        norm="layer",
        activations=GELU,
        required={"qk_layernorm": (False,)},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        layer={
            **NORMS, "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        },
        window_caps_context=True,
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": replace(
        _QWEN2,
        architecture="qwen2moe",
        layer={**NORMS, **ATTENTION, **EXPERTS, **SHARED_EXPERT},
        required={**_NOT_ALL_DENSE, "use_sliding_window": (False,), "norm_topk_prob": (False,)},
    ),
    "Qwen3ForCausalLM": replace(
        _QWEN2, architecture="qwen3", layer={**NORMS, **ATTENTION, **QK_NORMS, **FEED_FORWARD}
    ),
    "Qwen3MoeForCausalLM": replace(
        _QWEN2,
        architecture="qwen3moe",
        layer={**NORMS, **ATTENTION, **QK_NORMS, **EXPERTS},
        required={**_NOT_ALL_DENSE, "use_sliding_window": (False,), "norm_topk_prob": (True,)},
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        layer={**NORMS, "post_attention_layernorm": "post_attention_norm", **ATTENTION, **FEED_FORWARD},
    ),
    "SmolLM3ForCausalLM": replace(
        _LLAMA,
        architecture="smollm3",
        required={"no_rope_layer_interval": (4,), "use_sliding_window": (False,)},
    ),
    "StableLmForCausalLM": Family(
        "stablelm", norm="layer", required={"use_parallel_residual": (False,), "qk_layernorm": (False,)}
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        layer={**NORMS, **ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        norm="layer",
        activations=GELU,
        window_caps_context=True,
    ),
}  # fmt: skip
"""Class name in `architectures` of config.json -> its family."""
