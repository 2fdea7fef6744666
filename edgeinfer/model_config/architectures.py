"""Every architecture as a row of facts; what a file's metadata says comes on top (`model_config.py`)."""

from dataclasses import dataclass
from typing import Literal

from edgeinfer_kernels.specification import Activation, Gating


@dataclass(frozen=True)
class Architecture:
    """What all models of one GGUF architecture have in common. The defaults are Llama's."""

    rope_neox: bool = False
    """RoPE turns (i, i + d/2) together; otherwise (2i, 2i + 1)."""
    norm: Literal["rms", "layer"] = "rms"
    activation: Activation = "silu"
    gated: bool = True
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["none", "head", "row"] = "none"
    embedding_scale_by_width: bool = False
    """Embeddings are multiplied by √width."""
    window_pattern: int = 0
    """Every n-th layer sees everything, the others a window; 0: no windows."""
    default_window: int = 0
    window_rope_base: float | None = None
    """RoPE base of windowed layers where the file gives none; None: that of the others."""
    window_rope_unscaled: bool = False
    """Windowed layers ignore RoPE scaling."""
    global_layer_first: bool = False
    """The layer that sees everything is the first of its `window_pattern` and not the last."""
    rope_in_windows_only: bool = False
    """In a model with windows the layers without one have no positions."""
    rope_skipped_every: int = 0
    """Every n-th layer has no positions at all; 0: none."""
    default_attention_soft_cap: float = 0.0
    default_logit_soft_cap: float = 0.0
    """Soft caps where the file gives none; 0: none."""
    query_scale_by_heads_at: int = 0
    """A model of this many layers scales queries by √(width / heads) instead of √(head dimension)."""
    sinks: bool = False
    feed_forward_norm: str = "ffn_norm"
    """The name under which files keep the norm before the feed-forward."""
    experts: Literal["never", "maybe", "always"] = "never"
    gating: Gating | None = "softmax"
    """How experts are weighed; None: as the file says."""
    expert_weights_normalized: bool = True
    expert_length_by_share: bool = False
    """Where the file doesn't give the experts' length it is feed_forward_length / expert_used_count."""
    shared_expert: Literal["none", "plain", "gated"] = "none"
    """Whether there may be an expert for every token; "gated": there is, weighed by a sigmoid."""
    early_router: bool = False
    """The router reads the layer's input."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(experts="maybe"),
    "arcee": Architecture(activation="relu_squared", gated=False),
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
    "gpt-oss": Architecture(
        rope_neox=True,
        activation="clamped_swiglu",
        window_pattern=2,
        sinks=True,
        feed_forward_norm="post_attention_norm",
        experts="always",
        gating="softmax_of_chosen",
        expert_weights_normalized=False,
    ),
    "granite": Architecture(),
    "granitemoe": Architecture(experts="maybe", shared_expert="plain"),
    "internlm2": Architecture(),
    "olmo2": Architecture(
        rope_neox=True,
        pre_norm=False,
        post_norm=True,
        qk_norm="row",
        window_pattern=4,
        window_rope_unscaled=True,
    ),
    "olmoe": Architecture(rope_neox=True, qk_norm="row", experts="always", expert_weights_normalized=False),
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
    "smallthinker": Architecture(
        rope_neox=True,
        activation="relu",
        window_pattern=4,
        global_layer_first=True,
        rope_in_windows_only=True,
        experts="always",
        gating=None,
        early_router=True,
    ),
    "smollm3": Architecture(rope_skipped_every=4),
    "starcoder2": Architecture(rope_neox=True, norm="layer", activation="gelu", gated=False),
}
"""GGUF `general.architecture` -> its facts."""
