"""The supported architectures, one table row each; values of the file's metadata are added in
`model_config.py`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.model_config.recurrent_blocks import (
    RecurrentReader,
    gated_delta_net,
    kimi_delta_attention,
    mamba,
    mamba2,
    repeated_delta_net,
    rwkv7_channel_mix,
    rwkv7_time_mix,
    short_convolution,
)
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.blocks.moe import Gating


@dataclass(frozen=True)
class Architecture:
    """The common properties of all models of one GGUF architecture. The defaults are Llama's."""

    rope_neox: bool = False
    """RoPE rotates the pairs (i, i + d/2); otherwise (2i, 2i + 1)."""
    rope_neox_with_sections: bool = False
    """RoPE rotates the pairs (i, i + d/2) if the file has `rope.dimension_sections`."""
    norm: Literal["rms", "layer"] = "rms"
    norm_weights: bool = True
    """Norms have weights."""
    activation: Activation = "silu"
    gated: bool = True
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["none", "head", "row"] = "none"
    qk_norm_optional: bool = False
    """Queries and keys are normalized if the file has the norms."""
    qk_norm_after_rope: bool = False
    """The q/k norm follows RoPE."""
    embedding_scale_by_width: bool = False
    """Embeddings are multiplied by √hidden_size."""
    window_pattern: int = 0
    """Every n-th layer has global attention, the others a sliding window; 0: no windows."""
    default_window: int = 0
    window_rope_base: float | None = None
    """Default RoPE base of windowed layers if the file has none; None: that of the other layers."""
    window_rope_unscaled: bool = False
    """Windowed layers ignore RoPE scaling."""
    global_layer_first: bool = False
    """The global attention layer is the first of its `window_pattern`, not the last."""
    rope_in_windows_only: bool = False
    """In a model with windows, layers with global attention use no RoPE."""
    rope_skipped_every: int = 0
    """Every n-th layer uses no RoPE; 0: none."""
    default_attention_soft_cap: float = 0.0
    default_logit_soft_cap: float = 0.0
    """Soft caps if the file has none; 0: no soft cap."""
    query_scale_by_heads_at: int = 0
    """A model with this number of layers scales queries by √(hidden size / heads) instead of √(head
    dimension)."""
    sinks: bool = False
    feed_forward_norm: str = "ffn_norm"
    """The tensor name of the norm before the feed-forward."""
    experts: Literal["never", "maybe", "always", "by_router"] = "never"
    """Which layers have experts; "by_router": those with a router."""
    gating: Gating | None = "softmax"
    """The gating function of the experts; None: given by the file."""
    default_gating: Gating | None = None
    """That of files without one; None: the file must have one."""
    expert_weights_normalized: bool | None = True
    """None: given by the file."""
    expert_selection_bias: Literal["never", "sigmoid", "always"] = "never"
    """Whether the selection of experts has a bias, `exp_probs_b`; "sigmoid": if their gating is one."""
    expert_groups: bool = False
    """The selection of experts may be limited to groups of them."""
    latent_experts: bool = False
    """The experts may read a latent projection, of `moe_latent_size` elements."""
    expert_length_by_share: bool = False
    """If the file has no expert feed-forward length, it is feed_forward_length / expert_used_count."""
    shared_expert: Literal["none", "plain", "gated"] = "none"
    """Whether there may be a shared expert; "gated": always, weighted by a sigmoid."""
    shared_length_of_one: bool = False
    """`expert_shared_feed_forward_length` is that of one of `expert_shared_count` shared experts."""
    recurrent: RecurrentReader | None = None
    """Reads the block that some layers have instead of attention."""
    recurrent_feed_forward: RecurrentReader | None = None
    """Reads the block that all layers have instead of a feed-forward."""
    embedding_norm: bool = False
    """The embedding is normalized."""
    recurrent_layers: Literal["no_kv_heads", "interval", "parallel"] = "no_kv_heads"
    """Which layers: those without KV heads; all but every `full_attention_interval`-th; or all, in parallel
    with attention on the same normed input.
    """
    single_blocks: bool = False
    """A layer is one block: a feed-forward if it has a length, else attention if it has KV heads, else the
    recurrent block."""
    parallel_feed_forward: bool = False
    """Attention and the feed-forward read the same norm, and both results are added to its input."""
    logits_multiplied: bool = False
    """Logits are multiplied by the file's `logit_scale`; otherwise divided."""
    rope: Literal["always", "never", "finetuned"] = "always"
    """Which models use RoPE; "finetuned": unless the file's `rope.scaling.finetuned` is false."""
    query_temperature: bool = False
    """Queries are multiplied by a factor that grows with the position, if the file has an
    `attention.temperature_scale`."""
    attention_gate: bool = False
    """The result of attention is multiplied by a sigmoid gate."""
    output_norm: str = "output_norm"
    """The tensor name of the final norm."""
    latent_attention: bool = False
    """Attention is latent attention (MLA)."""
    pre_attention_router: bool = False
    """The router reads the layer's input (pre-attention router)."""


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
    "llama": Architecture(experts="maybe"),
    "arcee": Architecture(activation="relu_squared", gated=False),
    "cohere2": Architecture(
        norm="layer",
        parallel_feed_forward=True,
        logits_multiplied=True,
        window_pattern=4,
        rope_in_windows_only=True,
    ),
    "command-r": Architecture(norm="layer", parallel_feed_forward=True, logits_multiplied=True),
    "bailingmoe": Architecture(experts="always", expert_weights_normalized=None, shared_expert="plain"),
    "bailingmoe2": Architecture(rope_neox=True, qk_norm="head", **_BIASED_EXPERTS, shared_length_of_one=True),
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
    "ernie4_5": Architecture(),
    "exaone": Architecture(rope_neox=True),
    "dots1": Architecture(rope_neox=True, qk_norm="head", **_BIASED_EXPERTS),
    "ernie4_5-moe": Architecture(experts="by_router", expert_selection_bias="always", shared_expert="plain"),
    "exaone4": Architecture(
        rope_neox=True,
        pre_norm=False,
        post_norm=True,
        qk_norm="head",
        window_pattern=4,
        rope_in_windows_only=True,
    ),
    "exaone-moe": Architecture(
        rope_neox=True,
        qk_norm="head",
        window_pattern=4,
        default_window=128,
        rope_in_windows_only=True,
        **_BIASED_EXPERTS,
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
    "granitemoe": Architecture(experts="maybe", shared_expert="plain"),
    "granitehybrid": Architecture(experts="maybe", shared_expert="plain", recurrent=mamba2, rope="finetuned"),
    "hunyuan-dense": Architecture(rope_neox=True, qk_norm="head", qk_norm_after_rope=True),
    "hunyuan-moe": Architecture(
        rope_neox=True, qk_norm="head", qk_norm_after_rope=True, experts="always", shared_expert="plain"
    ),
    "internlm2": Architecture(),
    "qwen35": Architecture(**_QWEN35),
    "qwen35moe": Architecture(**_QWEN35, experts="always", shared_expert="gated"),
    "qwen3next": Architecture(
        **{**_QWEN35, "recurrent": repeated_delta_net}, experts="always", shared_expert="gated"
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
    "jamba": Architecture(
        experts="by_router", expert_weights_normalized=False, recurrent=mamba, rope="never"
    ),
    "mamba": Architecture(recurrent=mamba, single_blocks=True, rope="never"),
    "lfm2moe": Architecture(
        rope_neox=True,
        qk_norm="head",
        recurrent=short_convolution,
        output_norm="token_embd_norm",
        experts="always",
        gating=None,
        expert_selection_bias="sigmoid",
    ),
    "mamba2": Architecture(recurrent=mamba2, single_blocks=True, rope="never"),
    "maincoder": Architecture(qk_norm="head", qk_norm_after_rope=True),
    "mistral3": Architecture(experts="maybe", query_temperature=True),
    "nemotron": Architecture(rope_neox=True, norm="layer", activation="relu_squared", gated=False),
    "minimax-m2": Architecture(
        rope_neox=True, qk_norm="row", experts="always", gating=None, expert_selection_bias="sigmoid"
    ),
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
    "qwen3moe": Architecture(rope_neox=True, qk_norm="head", experts="always", expert_length_by_share=True),
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
