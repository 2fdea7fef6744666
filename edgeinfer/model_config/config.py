"""The model config: architecture properties and GGUF metadata, combined to a decoder specification."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architectures import Architecture
from edgeinfer.model_config.experts_config import MAX_LAYERS, ExpertsConfig, ExpertsReader
from edgeinfer.model_config.latent_attention import (
    LatentConfig,
    latent_attention,
    latent_scale,
    latent_scaling,
)
from edgeinfer.model_config.rope_scaling import Factors, RopeScaling, rope_specification
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.block import BlockSpec, NormSpec
from edgeinfer_kernels.blocks.embedding_norm import EmbeddingNormSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.blocks.rope import RopeSpec
from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec
from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec, ResidualBlock

ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


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
    has_rope: bool = True
    latent: LatentConfig | None = None
    """The sizes of latent attention, if there is any."""
    routed_layers: Collection[int] | None = None
    """The layers with experts; None: all after the dense ones."""
    draft_heads: int = 0
    """Number of draft heads (MTP), whose tensors follow those of the last layer."""

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        vocabulary_size: int,
        routed_layers: Collection[int] | None = None,
    ) -> "ModelConfig":
        """Read the keys of the file's architecture; `vocabulary_size` is the embedding's number of rows.

        `routed_layers`: those with a router; None: all. It is read only if the architecture depends on it.

        Raises `UnsupportedModelError` for an unknown architecture, a missing key or an unsupported feature.
        """
        return _Reader(metadata, routed_layers).config(vocabulary_size)

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
        base, scaling = self.rope_base, self.rope_scaling
        if self.windowed[layer]:
            base = self.window_rope_base
            if self.architecture_spec.window_rope_unscaled:
                scaling, factors = RopeScaling(), None
        return rope_specification(self.rope_dim, base, self.architecture_spec.rope_neox, scaling, factors)

    def specification(self, factors: Factors | None = None) -> DecoderSpec:
        """The specification for the backends; `factors` divide the RoPE frequencies (see
        `model_weights.rope_factors`).
        """
        return DecoderSpec(
            hidden_size=self.width,
            vocabulary_size=self.vocabulary_size,
            layers=tuple(self._layer(i, factors) for i in range(len(self.shapes))),
            norm=self.norm,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            logit_soft_cap=self.logit_soft_cap,
            norm_name=self.architecture_spec.output_norm,
        ).with_slots()

    def _layer(self, index: int, factors: Factors | None) -> LayerSpec:
        spec = self.architecture_spec
        if spec.single_blocks:
            is_dense = self.shapes[index].feed_forward > 0
            block = self._feed_forward(index) if is_dense else self._token_mixer(index, factors)
            return LayerSpec((ResidualBlock(block, self.norm, "attn_norm", "", self.residual_scale),))
        names = (
            ("attn_norm" if spec.pre_norm else "", "post_attention_norm" if spec.post_norm else ""),
            (spec.feed_forward_norm if spec.pre_norm else "", "post_ffw_norm" if spec.post_norm else ""),
        )
        feed_forward = self.recurrent_feed_forward or self._feed_forward(index)
        mixer, last = (
            ResidualBlock(block, self.norm, *norms, self.residual_scale)
            for block, norms in zip((self._token_mixer(index, factors), feed_forward), names, strict=True)
        )
        blocks = [mixer, last]
        if spec.embedding_norm and index == 0:
            blocks.insert(0, ResidualBlock(EmbeddingNormSpec(self.norm), self.norm))
        if spec.recurrent_layers == "parallel":
            attention = self._attention(index, factors)
            blocks.insert(1, replace(mixer, block=attention, norm_name="", shares_input=True))
        return LayerSpec(tuple(blocks))

    def _token_mixer(self, index: int, factors: Factors | None) -> BlockSpec:
        """The block of a layer that reads earlier tokens."""
        if self.recurrent is not None and self.recurrent_layers[index]:
            if isinstance(self.recurrent, Rwkv7TimeMixSpec):
                return replace(self.recurrent, is_first=index == 0)
            return self.recurrent
        if self.latent is not None:
            rope, heads = self._rope(index, factors), self.shapes[index].heads
            return self.latent.specification(heads, self.query_scale, self.norm, rope)
        return self._attention(index, factors)

    def _attention(self, index: int, factors: Factors | None) -> AttentionSpec:
        return AttentionSpec(
            heads=self.shapes[index].heads,
            kv_heads=self.shapes[index].kv_heads,
            head_dim=self.head_dim,
            scale=self.query_scale,
            norm=self.norm,
            rope=self._rope(index, factors),
            qk_norm=self.architecture_spec.qk_norm,
            qk_norm_after_rope=self.architecture_spec.qk_norm_after_rope,
            window=self.window if self.windowed[index] else 0,
            soft_cap=self.attention_soft_cap,
            sinks=self.architecture_spec.sinks,
            gated=self.architecture_spec.attention_gate,
        )

    def _feed_forward(self, index: int) -> FeedForwardSpec | MoeSpec:
        experts = self.experts_of(index)
        if experts is None:
            neurons = self.shapes[index].feed_forward
            return FeedForwardSpec(self.architecture_spec.activation, neurons, self.architecture_spec.gated)
        return MoeSpec(
            activation=self.architecture_spec.activation,
            experts=experts.count,
            experts_per_token=experts.experts_per_token,
            neurons=experts.feed_forward,
            gating=experts.gating,
            normalized=experts.normalized,
            scale=experts.scale,
            pre_attention_router=self.architecture_spec.pre_attention_router,
            shared_neurons=experts.shared,
            shared_gate=self.architecture_spec.shared_expert == "gated",
            gated=self.architecture_spec.gated,
            selection_bias=self.architecture_spec.expert_selection_bias in ("always", experts.gating),
            latent_size=experts.latent,
            groups=experts.groups,
            groups_per_token=experts.groups_per_token,
        )


class _Reader(ExpertsReader):
    """Reads the config of one architecture."""

    def shapes(self, layers: int, experts: ExpertsConfig | None) -> tuple[LayerShape, ...]:
        single = self.architecture_spec.single_blocks
        no_heads = single or self.architecture_spec.recurrent_feed_forward is not None
        heads = self.per_layer(
            "attention.head_count",
            layers,
            minimum=int(not no_heads),
        )
        min_kv_heads = 0 if self.architecture_spec.recurrent_layers == "no_kv_heads" else 1
        dense = experts is None or experts.dense_layers > 0 or single or self.routed_layers is not None
        rows = zip(
            heads,
            self.per_layer("attention.head_count_kv", layers, heads[0], min_kv_heads),
            self.per_layer("feed_forward_length", layers, minimum=int(not single)) if dense else [0] * layers,
            strict=True,
        )
        shapes = tuple(LayerShape(*row) for row in rows)
        for shape in shapes:
            if shape.kv_heads and (shape.heads % shape.kv_heads or not shape.heads):
                raise UnsupportedModelError(
                    f"{self.name}.attention.head_count: {shape.heads} heads can't share "
                    f"{shape.kv_heads} key heads"
                )
        return shapes

    def recurrent_layers(self, shapes: Sequence[LayerShape]) -> tuple[bool, ...]:
        """Which layers have the recurrent block."""
        if self.architecture_spec.recurrent is None:
            return (False,) * len(shapes)
        if self.architecture_spec.recurrent_layers != "interval":
            parallel = self.architecture_spec.recurrent_layers == "parallel"
            return tuple(parallel or not shape.kv_heads for shape in shapes)
        given = self.get("attention.recurrent_layers")
        if given is None:
            every = self.count("full_attention_interval", 4, maximum=MAX_LAYERS)
            return tuple((layer + 1) % every != 0 for layer in range(len(shapes)))
        values = given.tolist() if isinstance(given, np.ndarray) else given
        if not isinstance(values, list) or len(values) < len(shapes):
            raise self.refused("attention.recurrent_layers", given, f"one value for each of {len(shapes)}")
        return tuple(bool(value) for value in values[: len(shapes)])

    def recurrent_feed_forward(self, width: int) -> BlockSpec | None:
        read = self.architecture_spec.recurrent_feed_forward
        return read(self, width, self.norm()) if read else None

    def norm(self) -> NormSpec:
        key = "layer_norm_rms_epsilon" if self.architecture_spec.norm == "rms" else "layer_norm_epsilon"
        default = self.get("attention.layer_norm_epsilon", 1e-5)
        return NormSpec(self.architecture_spec.norm, self.number(f"attention.{key}", default, above=0))

    def scaling(self, trained_context: int) -> RopeScaling:
        kind = str(self.get("rope.scaling.type", "linear"))
        if kind not in ROPE_SCALINGS:
            raise self.refused("rope.scaling.type", kind, f"one of {', '.join(ROPE_SCALINGS)}")
        factor = self.factor("rope.scaling.factor") or self.factor("rope.scale_linear") or 1.0
        return RopeScaling(
            kind=kind,
            factor=1.0 if kind == "none" else factor,
            original_context=self.count("rope.scaling.original_context_length", trained_context),
            attention_factor=self.number("rope.scaling.attn_factor", 1.0, above=0),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
            extrapolation=self.number("rope.scaling.yarn_ext_factor", 1.0),
            log_multiplier=self.number("rope.scaling.yarn_log_multiplier", 0.0),
        )

    def windowed(self, layers: int, window: int) -> tuple[bool, ...]:
        """Which layers have a sliding window."""
        if not window or not self.architecture_spec.window_pattern:
            return (False,) * layers
        pattern = self.get("attention.sliding_window_pattern", self.architecture_spec.window_pattern)
        if isinstance(pattern, np.ndarray):
            if pattern.dtype.kind not in "biu" or len(pattern) != layers:
                seen = f"{len(pattern)} values of {pattern.dtype}"
                raise UnsupportedModelError(
                    f"{self.name}.attention.sliding_window_pattern: {seen}, wanted true or false "
                    f"for each of {layers} layers"
                )
            return tuple(bool(value) for value in pattern)
        every = self.count(
            "attention.sliding_window_pattern", self.architecture_spec.window_pattern, minimum=0
        )
        whole = 0 if self.architecture_spec.global_layer_first else every - 1
        return tuple(every == 0 or i % every != whole for i in range(layers))

    def query_scale(self, layers: int, width: int, heads: int, head_dim: int) -> float:
        given = self.factor("attention.scale")
        if given:
            return given
        by_heads = layers == self.architecture_spec.query_scale_by_heads_at
        return 1 / math.sqrt(width // heads if by_heads else head_dim)

    def has_rope(self) -> bool:
        rope = self.architecture_spec.rope
        return bool(self.get("rope.scaling.finetuned", True)) if rope == "finetuned" else rope == "always"

    def head_dim(self, width: int, heads: int) -> int:
        if not heads:
            return 2  # No layer has attention.
        head_dim = self.count("attention.key_length", max(1, width // heads), maximum=4096)
        value_dim = self.count("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise self.refused("attention.value_length", value_dim, f"the key length {head_dim}")
        return head_dim

    def embedding_scale(self, width: int) -> float:
        if self.architecture_spec.embedding_scale_by_width:
            return math.sqrt(width)
        return self.factor("embedding_scale") or 1.0

    def config(self, vocabulary_size: int) -> ModelConfig:
        spec = self.architecture_spec
        draft_heads = self.draft_heads()
        layers = self.count("block_count", minimum=1 + draft_heads, maximum=MAX_LAYERS) - draft_heads
        width = self.count("embedding_length", maximum=1 << 20)
        experts = self.experts(layers, width)
        shapes = self.shapes(layers, experts)
        heads = max(shape.heads for shape in shapes)
        latent = latent_attention(self) if spec.latent_attention else None
        head_dim = latent.key_length if latent else self.head_dim(width, heads)
        trained_context = self.count("context_length", 4096)
        window = self.count("attention.sliding_window", spec.default_window, minimum=0)
        rope_base = self.number("rope.freq_base", 10000.0, above=1)
        scaling = self.scaling(trained_context)
        return ModelConfig(
            architecture=self.name,
            architecture_spec=spec,
            width=width,
            vocabulary_size=vocabulary_size,
            trained_context=trained_context,
            head_dim=head_dim,
            rope_dim=self.count("rope.dimension_count", head_dim, minimum=2, maximum=head_dim) // 2 * 2,
            shapes=shapes,
            norm=self.norm(),
            rope_base=rope_base,
            window_rope_base=self.number("rope.freq_base_swa", spec.window_rope_base or rope_base, above=1),
            rope_scaling=latent_scaling(self, scaling) if latent else scaling,
            window=window,
            windowed=self.windowed(layers, window),
            query_scale=latent_scale(scaling, head_dim)
            if latent
            else self.query_scale(layers, width, heads, head_dim),
            attention_soft_cap=self.factor("attn_logit_softcapping", spec.default_attention_soft_cap),
            logit_soft_cap=self.factor("final_logit_softcapping", spec.default_logit_soft_cap),
            embedding_scale=self.embedding_scale(width),
            residual_scale=self.factor("residual_scale") or 1.0,
            logit_scale=1 / (self.factor("logit_scale") or 1.0),
            experts=experts,
            recurrent=spec.recurrent(self, width, self.norm()) if spec.recurrent else None,
            recurrent_layers=self.recurrent_layers(shapes),
            recurrent_feed_forward=self.recurrent_feed_forward(width),
            has_rope=self.has_rope(),
            latent=latent,
            routed_layers=self.routed_layers,
            draft_heads=draft_heads,
        )
