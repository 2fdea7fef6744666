"""The random models of the tests: one or more for every architecture."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tests.moe_zoo import MOE_ZOO
from tests.random_gemma import gemma3n_layers, gemma4_parts
from tests.random_hybrids import delta_net, mamba_layers
from tests.random_kimi import delta_attention
from tests.random_latents import latent_layers
from tests.random_models import RandomModel
from tests.zoo.dense_zoo import DENSE_ZOO
from tests.zoo.recurrent_zoo import RECURRENT_ZOO

_QKV = ("attn_q", "attn_k", "attn_v")
_Q5 = (*_QKV, "attn_output")
_ALL_BIASES = (*_Q5, "ffn_up", "ffn_down")


def _sections(*pairs: int) -> npt.NDArray[np.int32]:
    """Pairs of RoPE dimensions for each part of a position; a text's parts are the same."""
    return np.array([*pairs, 0], np.int32)


def _long_factors(count: int, end: float) -> npt.NDArray[np.float32]:
    return np.linspace(1.0, end, count, dtype=np.float32)


ZOO: dict[str, RandomModel] = {
    "llama": RandomModel("llama"),
    "llama-tied-biases": RandomModel("llama", tied=True, biases=_Q5),
    "llama-linear": RandomModel(
        "llama", extra={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 20000.0}
    ),
    "llama-yarn": RandomModel(
        "llama",
        extra={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "llama3-factors": RandomModel(
        "llama", extra={"rope.freq_base": 500000.0}, rope_tensors={"rope_freqs.weight": _long_factors(8, 8.0)}
    ),
    "cohere2": RandomModel(
        "cohere2", layers=5, tied=True, extra={"attention.sliding_window": 6, "logit_scale": 0.25}
    ),
    "command-r": RandomModel("command-r", tied=True, extra={"logit_scale": 0.0625}),
    "deepseek2": RandomModel(
        "deepseek2",
        experts=8,
        experts_per_token=3,
        expert_length=32,
        shared_length=64,
        dense_layers=1,
        hybrid=latent_layers(query_share=0.5),
        extra={"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5},
    ),
    "deepseek2-lite": RandomModel(
        "deepseek2",
        layers=4,
        experts=6,
        experts_per_token=2,
        expert_length=32,
        shared_length=32,
        dense_layers=1,
        hybrid=latent_layers(),
        extra={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "expert_gating_func": 1,
        },
    ),
    "ernie4_5": RandomModel("ernie4_5", tied=True),
    "exaone": RandomModel("exaone", rope_tensors={"rope_freqs.weight": _long_factors(8, 8.0)}),
    "exaone4": RandomModel("exaone4", tied=True),
    "gemma": RandomModel("gemma", tied=True, head_dim=32),
    "gemma2": RandomModel(
        "gemma2",
        layers=4,
        tied=True,
        head_dim=32,
        extra={
            "attention.sliding_window": 6,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": RandomModel(
        "gemma3",
        layers=7,
        tied=True,
        head_dim=32,
        extra={
            "attention.sliding_window": 6,
            "rope.freq_base": 1000000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3n": RandomModel(
        "gemma3n", layers=22, tied=True, head_dim=32, post_norms=0.25, hybrid=gemma3n_layers()
    ),
    "gemma4": RandomModel("gemma4", layers=5, tied=True, head_dim=32, **gemma4_parts("wwgwg")),
    "gemma4-per-layer": RandomModel(
        "gemma4", layers=6, tied=True, head_dim=32, **gemma4_parts("wwgwwg", shared_kv=3, per_layer=True)
    ),
    "gemma4-moe": RandomModel(
        "gemma4",
        layers=3,
        tied=True,
        head_dim=32,
        experts=8,
        experts_per_token=3,
        expert_length=32,
        fused_experts=True,
        **gemma4_parts("wgw", routed=True),
    ),
    "qwen35": RandomModel("qwen35", layers=4, hybrid=delta_net(2, 4, 16)),
    "qwen35-draft-head": RandomModel("qwen35", layers=4, hybrid=delta_net(2, 4, 16), draft_head=True),
    "qwen35-partial-rope": RandomModel(
        "qwen35",
        head_dim=32,
        hybrid=delta_net(3, 3, 32, interval=3, rope_dim=16),
        extra={"rope.dimension_count": 16, "attention.recurrent_layers": [True, True, False]},
    ),
    "qwen35moe": RandomModel(
        "qwen35moe",
        experts=8,
        experts_per_token=3,
        expert_length=32,
        shared_length=64,
        hybrid=delta_net(1, 2, 16),
    ),
    "qwen35moe-fused": RandomModel(
        "qwen35moe",
        experts=8,
        experts_per_token=3,
        expert_length=32,
        shared_length=64,
        fused_experts=True,
        hybrid=delta_net(1, 2, 16),
    ),
    "qwen3next": RandomModel(
        "qwen3next",
        experts=8,
        experts_per_token=3,
        expert_length=32,
        shared_length=64,
        hybrid=delta_net(2, 4, 16, layout="qwen3next"),
    ),
    "qwen3next-legacy": RandomModel(
        "qwen3next",
        experts=8,
        experts_per_token=3,
        expert_length=32,
        shared_length=64,
        hybrid=delta_net(2, 6, 16, layout="legacy"),
    ),
    "kimi-linear": RandomModel(
        "kimi-linear",
        layers=4,
        experts=8,
        experts_per_token=3,
        expert_length=32,
        shared_length=32,
        dense_layers=1,
        hybrid=delta_attention("kkak", 32),
        extra={"expert_gating_func": 2, "expert_weights_scale": 2.5},
    ),
    "kimi-linear-wide-heads": RandomModel(
        "kimi-linear",
        heads=2,
        experts=6,
        experts_per_token=2,
        expert_length=32,
        shared_length=64,
        dense_layers=2,
        hybrid=delta_attention("kka", 96, taps=3, fused=True),
        extra={"expert_gating_func": 2},
    ),
    "granitehybrid": RandomModel(
        "granitehybrid",
        layers=4,
        hybrid=mamba_layers("mmam", 4, 32, 32),
        extra={
            "rope.scaling.finetuned": False,
            "logit_scale": 6.0,
            "residual_scale": 0.22,
            "embedding_scale": 3.0,
            "attention.scale": 0.1,
        },
    ),
    "granitehybrid-moe": RandomModel(
        "granitehybrid",
        experts=8,
        experts_per_token=3,
        shared_length=64,
        hybrid=mamba_layers("mam", 8, 16, 16),
        extra={"logit_scale": 2.0},
    ),
    "nemotron": RandomModel("nemotron", extra={"rope.dimension_count": 8}),
    "nemotron_h": RandomModel("nemotron_h", layers=4, hybrid=mamba_layers("mfam", 4, 16, 32, groups=2)),
    "nemotron_h_moe": RandomModel(
        "nemotron_h_moe",
        layers=4,
        experts=8,
        experts_per_token=3,
        expert_length=64,
        shared_length=96,
        hybrid=mamba_layers("mfaf", 4, 16, 32, groups=2),
        extra={"expert_weights_norm": True, "expert_weights_scale": 2.5},
    ),
    "nemotron_h_moe-latent": RandomModel(
        "nemotron_h_moe",
        layers=4,
        experts=8,
        experts_per_token=3,
        expert_length=64,
        shared_length=96,
        latent_size=32,
        hybrid=mamba_layers("fmaf", 4, 16, 32, groups=2),
        extra={"expert_weights_norm": True, "expert_weights_scale": 2.5},
    ),
    "lfm2moe": RandomModel(
        "lfm2moe",
        layers=4,
        convolutions=(1, 2),
        tied=True,
        experts=8,
        experts_per_token=3,
        expert_length=32,
        dense_layers=1,
        extra={"expert_gating_func": 2},
    ),
    "lfm2": RandomModel("lfm2", layers=4, convolutions=(1, 2), tied=True),
    "granite": RandomModel(
        "granite",
        extra={"logit_scale": 6.0, "residual_scale": 0.22, "embedding_scale": 3.0, "attention.scale": 0.1},
    ),
    "glm4": RandomModel(
        "glm4", head_dim=32, fused_gate=True, biases=_QKV, extra={"rope.dimension_count": 16}
    ),
    "glm4-sections": RandomModel(
        "glm4",
        tied=True,
        fused_gate=True,
        biases=_QKV,
        extra={"rope.dimension_sections": _sections(2, 3, 3)},
    ),
    "gpt-oss": RandomModel(
        "gpt-oss",
        layers=4,
        head_dim=32,
        experts=6,
        experts_per_token=3,
        expert_length=96,
        biases=(*_Q5, "ffn_gate_inp"),
        extra={
            "attention.sliding_window": 6,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "granitemoe": RandomModel(
        "granitemoe",
        experts=8,
        experts_per_token=3,
        extra={"logit_scale": 6.0, "residual_scale": 0.22, "embedding_scale": 3.0, "attention.scale": 0.1},
    ),
    "granitemoe-shared": RandomModel(
        "granitemoe", experts=5, experts_per_token=2, shared_length=64, tied=True, extra={"logit_scale": 2.0}
    ),
    "hunyuan-dense": RandomModel("hunyuan-dense", tied=True, head_dim=32),
    "maincoder": RandomModel("maincoder", biases=_QKV),
    "mellum": RandomModel(
        "mellum",
        layers=5,
        experts=8,
        experts_per_token=2,
        expert_length=64,
        extra={
            "attention.sliding_window": 6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "mistral3": RandomModel(
        "mistral3",
        tied=True,
        extra={
            "attention.temperature_scale": 0.4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 8,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "mixtral": RandomModel("llama", experts=4, experts_per_token=2),
    "muse-glimmer": RandomModel(
        "muse-glimmer",
        layers=5,
        gate_tensors=True,
        extra={
            "attention.sliding_window": 6,
            "rope.freq_base_swa": 5000.0,
            "logit_scale": 0.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo2": RandomModel("olmo2", kv_heads=4),
    "olmo2-windows": RandomModel("olmo2", layers=5, extra={"attention.sliding_window": 6}),
    "olmoe": RandomModel("olmoe", kv_heads=4, experts=9, experts_per_token=4),
    "pangu-embedded": RandomModel("pangu-embedded", biases=_Q5),
    "phi3": RandomModel("phi3", fused=True),
    "phi3-longrope": RandomModel(
        "phi3",
        fused=True,
        extra={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.19,
        },
        rope_tensors={
            "rope_factors_long.weight": _long_factors(8, 40.0),
            "rope_factors_short.weight": _long_factors(8, 2.0),
        },
    ),
    "qwen2": RandomModel("qwen2", biases=_QKV),
    "qwen2moe": RandomModel(
        "qwen2moe",
        biases=_QKV,
        experts=7,
        experts_per_token=3,
        expert_length=32,
        shared_length=128,
    ),
    "qwen2vl": RandomModel(
        "qwen2vl",
        biases=_QKV,
        # llama.cpp doesn't read the epsilon of this architecture and takes 0.
        extra={"rope.dimension_sections": _sections(2, 3, 3), "attention.layer_norm_rms_epsilon": 1e-12},
    ),
    "qwen3": RandomModel("qwen3", head_dim=32),
    "qwen3vl": RandomModel("qwen3vl", tied=True, extra={"rope.dimension_sections": _sections(3, 3, 2)}),
    "qwen3vlmoe": RandomModel(
        "qwen3vlmoe",
        experts=8,
        experts_per_token=3,
        expert_length=64,
        extra={"rope.dimension_sections": _sections(3, 3, 2)},
    ),
    "qwen3moe": RandomModel("qwen3moe", head_dim=32, experts=16, experts_per_token=5, expert_length=64),
    "seed_oss": RandomModel("seed_oss", biases=_QKV),
    "smallthinker": RandomModel(
        "smallthinker",
        layers=5,
        experts=8,
        experts_per_token=3,
        expert_length=96,
        extra={"expert_gating_func": 2, "attention.sliding_window": 4096},
    ),
    "smallthinker-softmax": RandomModel(
        "smallthinker",
        tied=True,
        experts=8,
        experts_per_token=2,
        expert_length=64,
        extra={"expert_gating_func": 1},
    ),
    "smollm3": RandomModel("smollm3", layers=5, tied=True),
    "stablelm": RandomModel("stablelm", biases=_QKV, extra={"rope.dimension_count": 4}),
    "starcoder2": RandomModel("starcoder2", tied=True, biases=_ALL_BIASES),
    **DENSE_ZOO,
    **RECURRENT_ZOO,
    **MOE_ZOO,
}
"""One file or more for every architecture; their goldens come from llama.cpp."""
ON_CPU_ONLY = ("mimo2-fused",)
"""Models that a GPU refuses."""
SMALL_GEMMA3N = replace(ZOO["gemma3n"], layers=4, hybrid=gemma3n_layers(own_caches=2, sparse=1, pattern=2))
"""Gemma 3n in four layers: two have a cache, two share those; the first one has few active neurons."""
