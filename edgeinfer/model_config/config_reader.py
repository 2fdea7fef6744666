"""Reads a model's config from the metadata of its file."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architecture import Architecture
from edgeinfer.model_config.config import LayerShape, ModelConfig
from edgeinfer.model_config.experts_config import MAX_LAYERS, ExpertsConfig, ExpertsReader
from edgeinfer.model_config.latent_attention import latent_attention, latent_scale, latent_scaling
from edgeinfer.model_config.layers.altup import DEFAULT_PER_LAYER_WIDTH, LAYERS_WITH_CACHES, altup_config
from edgeinfer.model_config.rope_scaling import RopeScaling
from edgeinfer_kernels.blocks.common.alibi import MAX_ALIBI_BIAS
from edgeinfer_kernels.blocks.common.block import BlockSpec, NormSpec
from edgeinfer_kernels.blocks.common.temperature import NO_TEMPERATURE, Temperature

BAICHUAN_LAYERS = {32: False, 40: True}
"""Layers of Baichuan's models, 7B and 13B, and whether they have ALiBi instead of RoPE."""
MIN_LIMIT = 1e-6
"""A limit of SwiGLU up to this one is none."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


def config_from_metadata(
    metadata: Mapping[str, Any],
    vocabulary_size: int,
    routed_layers: Collection[int] | None = None,
    *,
    architecture: Architecture | None = None,
) -> ModelConfig:
    """The config from the keys of the file's architecture.

    `vocabulary_size`: the number of rows of the embedding.
    `routed_layers`: those with a router; None: all. It is read only if the architecture depends on it.
    `architecture`: its properties, if it isn't one of the table: that of a draft head.

    Raises `UnsupportedModelError` for an unknown architecture, a missing key or an unsupported feature.
    """
    return _ConfigReader(metadata, routed_layers, architecture).config(vocabulary_size)


class _ConfigReader(ExpertsReader):
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
            self.feed_forward_lengths(layers, minimum=int(not single)) if dense else [0] * layers,
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

    def feed_forward_lengths(self, layers: int, minimum: int) -> list[int]:
        lengths = self.per_layer("feed_forward_length", layers, minimum=minimum)
        return [length // 2 for length in lengths] if self.architecture_spec.feed_forward_halved else lengths

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
        epsilon = self.number(f"attention.{key}", default, above=0)
        return NormSpec(self.architecture_spec.norm, epsilon, self.architecture_spec.norm_weights)

    def draft_norm(self) -> NormSpec | None:
        """The last norm of draft heads; None: as the others."""
        if not self.architecture_spec.layer_normed_drafts:
            return None
        return NormSpec("layer", self.number("attention.layer_norm_epsilon", 1e-5, above=0))

    def scaling(self, trained_context: int) -> RopeScaling:
        kind = str(self.get("rope.scaling.type", "linear"))
        if kind not in ROPE_SCALINGS:
            raise self.refused("rope.scaling.type", kind, f"one of {', '.join(ROPE_SCALINGS)}")
        if kind == "yarn" and self.architecture_spec.qk_norm_after_rope:
            raise self.refused("rope.scaling.type", kind, "a scaling that keeps the length of heads")
        alpha = self.factor("rope.scaling.alpha")
        if alpha:
            raise self.refused("rope.scaling.alpha", alpha, "0, a base that includes it")
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

    def temperature(self, original_context: int) -> Temperature:
        """That of queries; with latent attention the file has its length."""
        scale = self.factor("attention.temperature_scale")
        if not scale or not self.architecture_spec.query_temperature:
            return NO_TEMPERATURE
        is_latent = self.architecture_spec.latent_attention
        return Temperature(
            scale, self.count("attention.temperature_length") if is_latent else original_context
        )

    def window_length(self) -> int:
        """Positions of a window; 0: there are none."""
        spec, key = self.architecture_spec, "attention.sliding_window"
        given = self.count(key, spec.chunk_window or spec.default_window, minimum=0)
        if spec.chunk_window and not given:
            raise self.refused(key, given, f"windows, which are chunks of {spec.chunk_window} tokens")
        return spec.chunk_window or given

    def windowed(self, layers: int, window: int) -> tuple[bool, ...]:
        """Which layers have a sliding window."""
        if not window or not self.architecture_spec.window_pattern:
            return (False,) * layers
        pattern = self.get("attention.sliding_window_pattern", self.architecture_spec.window_pattern)
        if isinstance(pattern, np.ndarray):
            if len(pattern) == layers + self.draft_heads():
                pattern = pattern[:layers]
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
        given = self.architecture_spec.attention_scale or self.factor("attention.scale")
        if given:
            return given
        if self.architecture_spec.attention_scale_by_head:
            return 1 / head_dim
        by_heads = layers == self.architecture_spec.query_scale_by_heads_at
        return 1 / math.sqrt(width // heads if by_heads else head_dim)

    def alibi(self, layers: int) -> float:
        """The maximum bias of ALiBi; 0: none."""
        kind = self.architecture_spec.alibi
        if kind == "by_key":
            return self.factor("attention.max_alibi_bias")
        if kind == "13b" and layers not in BAICHUAN_LAYERS:
            raise self.refused("block_count", layers, "32 layers (7B, with RoPE) or 40 (13B, with ALiBi)")
        return MAX_ALIBI_BIAS if kind == "always" or (kind == "13b" and BAICHUAN_LAYERS[layers]) else 0.0

    def own_norms(self) -> bool:
        kind = self.architecture_spec.own_norms
        return kind == "always" or (kind == "by_key" and self.flag("use_parallel_residual"))

    def has_rope(self, layers: int) -> bool:
        rope = self.architecture_spec.rope
        if self.alibi(layers):
            return False
        return bool(self.get("rope.scaling.finetuned", True)) if rope == "finetuned" else rope == "always"

    def has_sections(self) -> bool:
        """Whether RoPE has sections of positions; those of text are the same in all of them."""
        given = self.get("rope.dimension_sections")
        values = given.tolist() if isinstance(given, np.ndarray) else given
        return isinstance(values, list) and bool(values) and all(values[:2])

    def head_dim(self, width: int, heads: int) -> int:
        if not heads:
            return 2  # No layer has attention.
        head_dim = self.count("attention.key_length", max(1, width // heads), maximum=4096)
        value_dim = self.count("attention.value_length", head_dim)
        if value_dim != head_dim and not self.architecture_spec.value_lengths:
            raise self.refused("attention.value_length", value_dim, f"the key length {head_dim}")
        return head_dim

    def value_lengths(self, head_dim: int) -> dict[str, Any]:
        """The fields of `ModelConfig` for the values of heads."""
        if not self.architecture_spec.value_lengths:
            return {}
        length = self.count("attention.value_length", head_dim, maximum=head_dim)
        return {
            "value_dim": length if length < head_dim else 0,
            "attention_result_scale": self.factor("attention.value_scale") or 1.0,
        }

    def window_heads(self, head_dim: int, rope_dim: int) -> tuple[int, int]:
        """The head dimension and the RoPE dimensions of layers with windows."""
        spec = self.architecture_spec
        if not spec.window_heads:
            own = self.count("rope.dimension_count_swa", rope_dim, minimum=2, maximum=head_dim) // 2 * 2
            return head_dim, own if spec.window_rope_dims else rope_dim
        own = self.count("attention.key_length_swa", head_dim, maximum=4096)
        if self.count("attention.value_length_swa", own) != own:
            value = self.get("attention.value_length_swa")
            raise self.refused("attention.value_length_swa", value, f"the key length {own}")
        return own, self.count(
            "rope.dimension_count_swa", min(rope_dim, own), minimum=2, maximum=own
        ) // 2 * 2

    def shared_kv_layers(self, windowed: Sequence[bool], shapes: Sequence[LayerShape]) -> int:
        """Number of last layers that read the KV caches of two earlier ones, with and without a window."""
        if not self.architecture_spec.window_heads:
            return 0
        key, layers = "attention.shared_kv_layers", len(shapes)
        default = max(0, layers - LAYERS_WITH_CACHES) if self.architecture_spec.altup else 0
        shared = self.count(key, default, minimum=0, maximum=max(0, layers - 2))
        own = layers - shared
        for layer in range(own, layers):
            source = own - (2 if windowed[layer] else 1)
            if windowed[source] != windowed[layer] or shapes[source].kv_heads != shapes[layer].kv_heads:
                raise self.refused(
                    key, shared, f"layer {source} to have the window and heads of layer {layer}"
                )
        return shared

    def swiglu_limits(self, key: str, layers: int) -> tuple[float, ...]:
        """The limits of SwiGLU in each layer; 0: none."""
        given = self.get(key) if self.architecture_spec.swiglu_limits else None
        if given is None:
            return (0.0,) * layers
        values = given.tolist() if isinstance(given, np.ndarray) else [given] * layers
        if len(values) not in (layers, layers + self.draft_heads()) or not all(
            isinstance(value, float | int) and 0 <= value < math.inf for value in values
        ):
            raise self.refused(key, given, f"a number of at least 0, or one for each of {layers} layers")
        return tuple(float(value) if value > MIN_LIMIT else 0.0 for value in values[:layers])

    def per_layer_width(self) -> int:
        altup = self.architecture_spec.altup
        if not self.architecture_spec.layer_outputs and not altup:
            return 0
        default, minimum = (DEFAULT_PER_LAYER_WIDTH, 16) if altup else (0, 0)
        width = self.count("embedding_length_per_layer_input", default, minimum=minimum, maximum=1 << 12)
        if width % 16:
            raise self.refused("embedding_length_per_layer_input", width, "a multiple of 16")
        return width

    def embedding_scale(self, width: int) -> float:
        if self.architecture_spec.embedding_scale_by_width:
            return math.sqrt(width)
        return self.factor("embedding_scale", 12.0 if self.architecture_spec.minicpm_scales else 0.0) or 1.0

    def residual_scale(self, layers: int) -> float:
        default = 1.4 / math.sqrt(layers) if self.architecture_spec.minicpm_scales else 0.0
        return self.factor("residual_scale", default) or 1.0

    def logit_scale(self, width: int) -> float:
        default = 256 / width if self.architecture_spec.minicpm_scales else 0.0
        scale = self.factor("logit_scale", default) or 1.0
        return scale if self.architecture_spec.logits_multiplied else 1 / scale

    def config(self, vocabulary_size: int) -> ModelConfig:
        spec = self.architecture_spec
        if self.factor("attention.clamp_kqv") and not spec.clamp:
            raise self.refused("attention.clamp_kqv", self.get("attention.clamp_kqv"), "0, no clamp")
        draft_heads = self.draft_heads()
        layers = self.count("block_count", minimum=1 + draft_heads, maximum=MAX_LAYERS) - draft_heads
        width = self.count("embedding_length", maximum=1 << 20)
        experts = self.experts(layers, width)
        shapes = self.shapes(layers, experts)
        heads = max(shape.heads for shape in shapes)
        latent = latent_attention(self) if spec.latent_attention else None
        head_dim = latent.key_length if latent else self.head_dim(width, heads)
        trained_context = self.count("context_length", 4096)
        window = self.window_length()
        rope_base = self.number("rope.freq_base", 10000.0, above=1)
        rope_dim = self.count("rope.dimension_count", head_dim, minimum=2, maximum=head_dim) // 2 * 2
        window_head_dim, window_rope_dim = self.window_heads(head_dim, rope_dim)
        windowed = self.windowed(layers, window)
        scaling = self.scaling(trained_context)
        return ModelConfig(
            architecture=self.name,
            architecture_spec=spec,
            width=width,
            vocabulary_size=vocabulary_size,
            trained_context=trained_context,
            head_dim=head_dim,
            **self.value_lengths(head_dim),
            rope_dim=rope_dim // 4 * 2 if spec.half_rope_dims else rope_dim,
            window_head_dim=window_head_dim,
            window_rope_dim=window_rope_dim,
            shared_kv_layers=self.shared_kv_layers(windowed, shapes),
            per_layer_width=self.per_layer_width(),
            shapes=shapes,
            norm=self.norm(),
            rope_base=rope_base,
            window_rope_base=self.number("rope.freq_base_swa", spec.window_rope_base or rope_base, above=1),
            rope_scaling=latent_scaling(self, scaling) if latent else scaling,
            window=window,
            windowed=windowed,
            query_scale=latent_scale(scaling, head_dim)
            if latent
            else self.query_scale(layers, width, heads, head_dim),
            temperature=self.temperature(scaling.original_context),
            attention_soft_cap=self.factor("attn_logit_softcapping", spec.default_attention_soft_cap),
            logit_soft_cap=self.factor("final_logit_softcapping", spec.default_logit_soft_cap),
            embedding_scale=self.embedding_scale(width),
            residual_scale=self.residual_scale(layers),
            logit_scale=self.logit_scale(width),
            experts=experts,
            recurrent=spec.recurrent(self, width, self.norm()) if spec.recurrent else None,
            recurrent_layers=self.recurrent_layers(shapes),
            recurrent_feed_forward=self.recurrent_feed_forward(width),
            has_rope=self.has_rope(layers),
            alibi=self.alibi(layers),
            clamp=self.factor("attention.clamp_kqv"),
            own_norms=self.own_norms(),
            has_positions=spec.positions == "always",
            rope_neox=spec.rope_neox or (spec.rope_neox_with_sections and self.has_sections()),
            altup=altup_config(self, layers) if spec.altup else None,
            latent=latent,
            expert_limits=self.swiglu_limits("swiglu_clamp_exp", layers),
            limits=self.swiglu_limits("swiglu_clamp_shexp", layers),
            routed_layers=self.routed_layers,
            draft_heads=draft_heads,
            draft_norm=self.draft_norm(),
        )
