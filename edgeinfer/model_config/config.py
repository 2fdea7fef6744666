"""The model config: architecture properties and GGUF metadata, combined to a decoder specification."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer.model_config.architecture import Architecture, Encoder
from edgeinfer.model_config.experts_config import ExpertsConfig
from edgeinfer.model_config.latent_attention import (
    LatentConfig,
)
from edgeinfer.model_config.layers.altup import AltUpConfig
from edgeinfer.model_config.rope_scaling import Factors, RopeScaling, rope_specification
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import BlockSpec, NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.common.temperature import NO_TEMPERATURE, Temperature
from edgeinfer_kernels.blocks.embedding.positions import PositionEmbeddingSpec
from edgeinfer_kernels.blocks.embedding_norm import EmbeddingNormSpec
from edgeinfer_kernels.blocks.encoder_attention import EncoderAttentionSpec
from edgeinfer_kernels.blocks.feed_forward import Activation, FeedForwardSpec, LimitedSwiglu
from edgeinfer_kernels.blocks.gemma3n.gaussian_feed_forward import GaussianFeedForwardSpec
from edgeinfer_kernels.blocks.layer_output import LayerOutputSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec
from edgeinfer_kernels.caches.ring_cache import ring_for
from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec, ResidualBlock


@dataclass(frozen=True)
class LayerShape:
    """Sizes that may differ between layers."""

    heads: int
    kv_heads: int
    feed_forward: int


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes and parameters; lengths in elements."""

    architecture: str
    architecture_spec: Architecture
    width: int
    vocabulary_size: int
    trained_context: int
    head_dim: int
    rope_dim: int
    shapes: tuple[LayerShape, ...]
    norm: NormSpec
    rope_base: float
    window_rope_base: float
    rope_scaling: RopeScaling
    window: int
    windowed: tuple[bool, ...]
    query_scale: float
    temperature: Temperature = NO_TEMPERATURE
    """That of queries by their position."""
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: ExpertsConfig | None = None
    recurrent: BlockSpec | None = None
    """The block of recurrent layers."""
    recurrent_layers: tuple[bool, ...] = ()
    recurrent_feed_forward: BlockSpec | None = None
    """The block that all layers have instead of a feed-forward."""
    alibi: float = 0.0
    """The maximum bias of ALiBi; 0: none."""
    clamp: float = 0.0
    """The largest magnitude of queries, keys and values; 0: no limit."""
    own_norms: bool = False
    """Attention and the feed-forward are parallel, each with its own norm."""
    has_positions: bool = False
    """Embeddings get the learned rows of their positions."""
    has_rope: bool = True
    rope_neox: bool = False
    value_dim: int = 0
    """Elements of a head's value; 0: as many as those of a key."""
    attention_result_scale: float = 1.0
    window_head_dim: int = 0
    window_rope_dim: int = 0
    """Those of layers with windows."""
    shared_kv_layers: int = 0
    """Number of last layers that read the KV caches of earlier ones."""
    per_layer_width: int = 0
    """Elements of a layer's input from the per-layer embeddings; 0: there are none."""
    expert_limits: tuple[float, ...] = ()
    limits: tuple[float, ...] = ()
    """Those of SwiGLU in the experts and the other feed-forwards of each layer; 0: none."""
    altup: AltUpConfig | None = None
    """AltUp's streams, if there are any."""
    latent: LatentConfig | None = None
    """The sizes of latent attention, if there is any."""
    routed_layers: Collection[int] | None = None
    """The layers with experts; None: all after the dense ones."""
    draft_heads: int = 0
    """Number of draft heads (MTP), whose tensors follow those of the last layer."""
    draft_norm: NormSpec | None = None
    """The last norm of draft heads; None: as the others."""

    @property
    def is_encoder(self) -> bool:
        """Whether the tokens of a text attend to all of it, so that there are no logits of a next token."""
        return self.architecture_spec.encoder is not None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The layer's experts; None: its feed-forward is dense."""
        if self.routed_layers is not None and layer not in self.routed_layers:
            return None
        return self.experts if self.experts and layer >= self.experts.dense_layers else None

    def _rope(self, layer: int, factors: Factors | None) -> RopeSpec | None:
        if not self.has_rope:
            return None
        every = self.architecture_spec.rope_skipped_every
        if every and (layer + 1) % every == 0:
            return None
        if self.architecture_spec.rope_in_windows_only and any(self.windowed) and not self.windowed[layer]:
            return None
        base, scaling, dimensions = self.rope_base, self.rope_scaling, self.rope_dim
        if self.windowed[layer]:
            base, dimensions = self.window_rope_base, self.window_rope_dim
            if self.architecture_spec.window_rope_unscaled:
                scaling, factors = RopeScaling(), None
        return rope_specification(dimensions, base, self.rope_neox, scaling, factors)

    def specification(self, factors: Factors | None = None) -> DecoderSpec:
        """The specification for the backends; `factors` divide the RoPE frequencies (see
        `model_weights.rope_factors`).
        """
        return DecoderSpec(
            hidden_size=self.width,
            vocabulary_size=self.vocabulary_size,
            layers=tuple(self.layer(i, factors) for i in range(len(self.shapes))),
            norm=self.norm,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            logit_soft_cap=self.logit_soft_cap,
            norm_name=self.architecture_spec.output_norm,
            per_layer_width=self.per_layer_width,
        ).with_slots()

    def layer(self, index: int, factors: Factors | None) -> LayerSpec:
        """The blocks of a layer."""
        spec = self.architecture_spec
        if spec.single_blocks:
            is_dense = self.shapes[index].feed_forward > 0
            block = self._feed_forward(index) if is_dense else self._token_mixer(index, factors)
            return LayerSpec((ResidualBlock(block, self.norm, "attn_norm", "", self.residual_scale),))
        names = (
            (spec.attention_norm if spec.pre_norm else "", "post_attention_norm" if spec.post_norm else ""),
            (
                self._feed_forward_norm(index) if spec.pre_norm else "",
                "post_ffw_norm" if spec.post_norm else "",
            ),
        )
        feed_forward = self.recurrent_feed_forward or self._feed_forward(index)
        mixer, last = (
            ResidualBlock(
                block, self.norm, *norms, self.residual_scale, post_norm_epsilon=spec.post_norm_epsilon
            )
            for block, norms in zip((self._token_mixer(index, factors), feed_forward), names, strict=True)
        )
        mixer = replace(mixer, residual_scale=self.attention_result_scale * mixer.residual_scale)
        output = LayerOutputSpec(self.norm, index, len(self.shapes), self.per_layer_width)
        if self.altup is not None:
            return self.altup.layer(mixer, last, output, self.norm, self.width)
        blocks = [mixer, last]
        if spec.encoder is not None:
            blocks = self._encoder_blocks(spec.encoder, index, mixer, last)
        if self.own_norms:  # The divisible block is the first.
            blocks = [last, replace(mixer, shares_input=True)]
        elif spec.parallel_feed_forward:
            first = replace(last, norm_name=mixer.norm_name)
            blocks = [first, replace(mixer, norm_name="", shares_input=True)]
        if spec.embedding_norm != "none" and index == 0:
            norm = replace(self.norm, has_weights=spec.embedding_norm == "weights")
            blocks.insert(0, ResidualBlock(EmbeddingNormSpec(norm), self.norm))
        if self.has_positions and index == 0:
            blocks.insert(0, ResidualBlock(PositionEmbeddingSpec(self.trained_context), self.norm))
        if spec.recurrent_layers == "parallel":
            attention = self._attention(index, factors)
            blocks.insert(1, replace(mixer, block=attention, norm_name="", shares_input=True))
        if spec.layer_outputs:
            blocks.append(ResidualBlock(output, self.norm))
        return LayerSpec(tuple(blocks))

    def _encoder_blocks(
        self, encoder: Encoder, index: int, mixer: ResidualBlock[Any], last: ResidualBlock[Any]
    ) -> list[ResidualBlock[Any]]:
        """The blocks of an encoder's layer, with the norms of its sums."""
        if not encoder.normed_sums:
            return [mixer if index or encoder.first_norm else replace(mixer, norm_name=""), last]
        norms = [
            ResidualBlock(EmbeddingNormSpec(self.norm, name, in_layer=True), self.norm)
            for name in ("attn_output_norm", "layer_output_norm")
        ]
        return [mixer, norms[0], last, norms[1]]

    def _feed_forward_norm(self, index: int) -> str:
        """The name of the norm before a layer's feed-forward, or before its experts besides a dense one."""
        with_dense = self.architecture_spec.shared_expert == "dense" and self.experts_of(index)
        return "pre_ffw_norm_2" if with_dense else self.architecture_spec.feed_forward_norm

    def _source_layer(self, index: int) -> int | None:
        """The layer whose KV cache a layer reads; None: its own."""
        own = len(self.shapes) - self.shared_kv_layers
        return None if index < own else own - (2 if self.windowed[index] else 1)

    def _token_mixer(self, index: int, factors: Factors | None) -> BlockSpec:
        """The block of a layer that reads earlier tokens."""
        if self.recurrent is not None and self.recurrent_layers[index]:
            if isinstance(self.recurrent, Rwkv7TimeMixSpec):
                return replace(self.recurrent, is_first=index == 0)
            return self.recurrent
        if self.latent is not None:
            rope, heads = self._rope(index, factors), self.shapes[index].heads
            return self.latent.specification(heads, self.query_scale, self.norm, rope, self.temperature)
        if self.architecture_spec.encoder is not None:
            return self._encoder_attention(self.architecture_spec.encoder, index, factors)
        return self._attention(index, factors)

    def _encoder_attention(
        self, encoder: Encoder, index: int, factors: Factors | None
    ) -> EncoderAttentionSpec:
        return EncoderAttentionSpec(
            heads=self.shapes[index].heads,
            kv_heads=self.shapes[index].kv_heads,
            head_dim=self.head_dim,
            scale=self.query_scale,
            norm=self.norm,
            rope=self._rope(index, factors),
            qk_norm=self.architecture_spec.qk_norm,
            window=self.window if self.windowed[index] else 0,
            alibi=encoder.alibi,
        )

    def _temperature(self, rope: RopeSpec | None) -> Temperature:
        """That of a layer's queries; in a model with chunks, of those without RoPE."""
        spec = self.architecture_spec
        if spec.chunk_temperature:
            return NO_TEMPERATURE if rope else Temperature(spec.chunk_temperature, spec.chunk_window, 1)
        return self.temperature

    def _qk_norm(self, rope: RopeSpec | None) -> dict[str, Any]:
        """The fields of `AttentionSpec` for the norm of queries and keys."""
        spec = self.architecture_spec
        if not spec.plain_qk_norm:
            return {"qk_norm": spec.qk_norm, "norm_after_rope": spec.qk_norm_after_rope}
        count = self.experts.count if self.experts else 0
        is_normed = rope is not None and count != spec.no_qk_norm_with_experts
        return {"qk_norm": "head" if is_normed else "none", "qk_norm_weights": False}

    def _attention(self, index: int, factors: Factors | None) -> AttentionSpec:
        window, rope = self.window if self.windowed[index] else 0, self._rope(index, factors)
        return AttentionSpec(
            heads=self.shapes[index].heads,
            kv_heads=self.shapes[index].kv_heads,
            head_dim=self.window_head_dim if self.windowed[index] else self.head_dim,
            scale=self.query_scale,
            norm=self.norm,
            rope=rope,
            **self._qk_norm(rope),
            window=window,
            chunked=window > 0 and self.architecture_spec.chunk_window > 0,
            ring=ring_for(window),
            soft_cap=self.attention_soft_cap,
            sinks=self.architecture_spec.sinks,
            optional_sinks=self.architecture_spec.optional_sinks,
            value_length=self.value_dim,
            gated=self.architecture_spec.attention_gate,
            alibi=self.alibi,
            clamp=self.clamp,
            sub_norm=self.architecture_spec.sub_norms,
            head_gated=self.architecture_spec.head_gate != "never",
            gate_function=self.architecture_spec.gate_function,
            value_norm=self.architecture_spec.value_norm,
            values_from_keys=self.architecture_spec.value_norm,
            source_layer=self._source_layer(index),
            temperature=self._temperature(rope),
        )

    def _activation(self, limits: Sequence[float], index: int) -> Activation:
        limit = limits[index] if limits else 0.0
        return LimitedSwiglu(limit) if limit else self.architecture_spec.activation

    def _feed_forward(self, index: int) -> FeedForwardSpec | GaussianFeedForwardSpec | MoeSpec:
        experts = self.experts_of(index)
        with_dense = self.architecture_spec.shared_expert == "dense"
        activation = self._activation(self.limits, index)
        if experts is None:
            neurons = self.shapes[index].feed_forward
            spec = self.architecture_spec
            if self.altup is not None:
                return self.altup.feed_forward(index, spec.activation, neurons)
            sub_norm = self.norm if spec.sub_norms else None
            return FeedForwardSpec(activation, neurons, spec.gated, sub_norm)
        return MoeSpec(
            activation=self._activation(self.expert_limits, index),
            shared_activation=activation,
            experts=experts.count,
            experts_per_token=experts.experts_per_token,
            neurons=experts.feed_forward,
            gating=experts.gating,
            normalized=experts.normalized,
            scale=experts.scale,
            pre_attention_router=self.architecture_spec.pre_attention_router,
            shared_neurons=self.shapes[index].feed_forward if with_dense else experts.shared,
            dense_norm=self.norm if with_dense else None,
            shared_gate=self.architecture_spec.shared_expert == "gated",
            gated=self.architecture_spec.gated,
            selection_bias=self.architecture_spec.expert_selection_bias in ("always", experts.gating),
            latent_size=experts.latent,
            groups=experts.groups,
            groups_per_token=experts.groups_per_token,
            weighted_input=self.architecture_spec.weighted_expert_input,
        )
