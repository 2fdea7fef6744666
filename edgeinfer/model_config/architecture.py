"""The properties of an architecture that its row in `architectures.py` gives."""

from dataclasses import dataclass
from typing import Literal

from edgeinfer.model_config.recurrent_blocks import RecurrentReader
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.blocks.moe import Gating


@dataclass(frozen=True)
class Encoder:
    """The properties of an encoder, in which the tokens of a text attend to all of it."""

    learned_positions: bool = False
    """Embeddings get a learned row of their position, `position_embd`."""
    token_types: bool = False
    """Embeddings get the first row of `token_types`."""
    alibi: bool = False
    normed_sums: bool = True
    """A norm follows each residual sum: `attn_output_norm` and `layer_output_norm`."""
    first_norm: bool = True
    """The first layer has a norm before attention, if the others do."""


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
    swiglu_limits: bool = False
    """SwiGLU may have limits, one for the experts of a layer and one for its other feed-forwards."""
    gated: bool = True
    pre_norm: bool = True
    post_norm: bool = False
    post_norm_epsilon: float = 0.0
    """The ε of post-norms; 0: that of the other norms."""
    qk_norm: Literal["none", "head", "row"] = "none"
    qk_norm_optional: bool = False
    """Queries and keys are normalized if the file has the norms."""
    plain_qk_norm: bool = False
    """Queries and keys of layers with RoPE are normalized without weights."""
    no_qk_norm_with_experts: int = 0
    """A model with this number of experts has no q/k norm; 0: none."""
    qk_norm_after_rope: bool = False
    """The q/k norm follows RoPE."""
    embedding_scale_by_width: bool = False
    """Embeddings are multiplied by √hidden_size."""
    window_pattern: int = 0
    """Every n-th layer has global attention, the others a sliding window; 0: no windows."""
    default_window: int = 0
    chunk_window: int = 0
    """Windows are chunks of this length, whatever the file has; 0: they end at each token."""
    window_rope_base: float | None = None
    """Default RoPE base of windowed layers if the file has none; None: that of the other layers."""
    window_rope_dims: bool = False
    """RoPE may rotate another number of dimensions in windowed layers."""
    half_rope_dims: bool = False
    """RoPE rotates half of the file's dimensions in layers without windows."""
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
    attention_scale: float = 0.0
    """The factor of scores; 0: that of the file, or 1/√(head dimension)."""
    value_norm: bool = False
    """Values are normalized without weights; without `attn_v` they are the projected keys."""
    window_heads: bool = False
    """Layers with windows may have heads of other sizes, and the last layers may share KV caches."""
    layer_outputs: bool = False
    """Layers end with a scale and, if the file has them, per-layer embeddings."""
    altup: bool = False
    """Layers have AltUp's streams, Laurel and per-layer embeddings, and the last ones share KV caches."""
    sinks: bool = False
    optional_sinks: bool = False
    """Some layers have no sinks."""
    value_lengths: bool = False
    """Values may be shorter than keys, and the result of attention may have a factor."""
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
    shared_expert: Literal["none", "plain", "gated", "dense"] = "none"
    """Whether there may be a shared expert; "gated": always, weighted by a sigmoid; "dense": always, the
    layer's dense feed-forward, with norms before and after it."""
    weighted_expert_input: bool = False
    """The weights of experts multiply what they read, not their results."""
    default_shared_count: int = 0
    """Number of shared experts, if the file doesn't have it."""
    shared_length_of_one: bool = False
    """`expert_shared_feed_forward_length` is that of one of `expert_shared_count` shared experts."""
    recurrent: RecurrentReader | None = None
    """Reads the block that some layers have instead of attention."""
    recurrent_feed_forward: RecurrentReader | None = None
    """Reads the block that all layers have instead of a feed-forward."""
    embedding_norm: Literal["none", "weights", "plain"] = "none"
    """Whether the embedding is normalized, with weights or without."""
    raw_draft_states: bool = False
    """Draft heads read hidden states before the norm, and each is a layer with its own entries in arrays."""
    draft_norms: tuple[str, ...] = ("nextn.shared_head_norm",)
    """The tensor names of the last norm of draft heads, of which the first in the file is used; without one
    it is that of the model."""
    layer_normed_drafts: bool = False
    """The last norm of draft heads is a LayerNorm, whatever the other norms are, and needs a tensor."""
    recurrent_layers: Literal["no_kv_heads", "interval", "parallel"] = "no_kv_heads"
    """Which layers: those without KV heads; all but every `full_attention_interval`-th; or all, in parallel
    with attention on the same normed input.
    """
    single_blocks: bool = False
    """A layer is one block: a feed-forward if it has a length, else attention if it has KV heads, else the
    recurrent block."""
    parallel_feed_forward: bool = False
    """Attention and the feed-forward read the same norm, and both results are added to its input."""
    feed_forward_halved: bool = False
    """A feed-forward has half of the file's feed-forward length."""
    minicpm_scales: bool = False
    """Without scales in the file, those of MiniCPM."""
    attention_norm: str = "attn_norm"
    """The tensor name of the norm before attention."""
    own_norms: Literal["never", "always", "by_key", "by_tensor"] = "never"
    """Which models have attention and the feed-forward in parallel with a norm of each; "by_key": if the
    file's `use_parallel_residual`; "by_tensor": if it has `attn_norm_2`, that of attention."""
    attention_scale_by_head: bool = False
    """Scores are multiplied by 1/head dimension."""
    alibi: Literal["never", "always", "by_key", "13b"] = "never"
    """Which models have ALiBi: "by_key": with an `attention.max_alibi_bias`; "13b": those of 40 layers
    (Baichuan 13B); those of 32 have RoPE."""
    clamp: bool = False
    """Queries, keys and values may be limited to `attention.clamp_kqv`."""
    sub_norms: bool = False
    """Attention and the feed-forward have a norm before their last projection."""
    positions: Literal["never", "always", "by_tensor"] = "never"
    """Which models add a learned row of its position to the embedding of a token; "by_tensor": with a
    `position_embd`."""
    logits_multiplied: bool = False
    """Logits are multiplied by the file's `logit_scale`; otherwise divided."""
    rope: Literal["always", "never", "finetuned"] = "always"
    """Which models use RoPE; "finetuned": unless the file's `rope.scaling.finetuned` is false."""
    chunk_temperature: float = 0.0
    """Queries of layers without RoPE are multiplied by a factor that grows with the chunk that follows."""
    query_temperature: bool = False
    """Queries are multiplied by a factor that grows with the position, if the file has an
    `attention.temperature_scale`."""
    attention_gate: bool = False
    """The result of attention is multiplied by a sigmoid gate, see `AttentionSpec`."""
    head_gate: Literal["never", "maybe", "always"] = "never"
    """Whether the result of a head is multiplied by a gate of the tensor `attn_gate`. A tensor with one for
    each element is that of `attention_gate`."""
    gate_function: Literal["sigmoid", "softplus"] = "sigmoid"
    """That of either kind of gates."""
    output_norm: str = "output_norm"
    """The tensor name of the final norm; "": there is none."""
    latent_attention: bool = False
    """Attention is latent attention (MLA)."""
    pre_attention_router: bool = False
    """The router reads the layer's input (pre-attention router)."""
    draft_head: bool = False
    """Its draft heads (MTP) are layers like those with attention before them."""
    encoder: Encoder | None = None
    """None: a decoder."""
