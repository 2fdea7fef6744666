"""Sizes and scales of latent attention from metadata, and the error for every unsupported key."""

import math
from dataclasses import replace
from typing import Any

import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY


def config_of(name: str, **extra: Any) -> ModelConfig:
    """The config of a model of the zoo with other keys; a key's dots are written as two underscores."""
    keys = {key.replace("__", "."): value for key, value in extra.items()}
    model = replace(ZOO[name], extra={**ZOO[name].extra, **keys})
    return config_from_metadata(model.metadata(), VOCABULARY)


def latent(name: str, **extra: Any) -> LatentAttentionSpec:
    spec: LatentAttentionSpec = config_of(name, **extra).specification().specs(LatentAttentionSpec)[0]
    return spec


def test_lengths_come_from_the_keys_of_latent_attention() -> None:
    spec = latent("deepseek2")
    assert (spec.nope_dim, spec.rope_dim, spec.value_dim, spec.latent_dim) == (32, 16, 48, 64)
    assert (spec.query_rank, spec.scale) == (32, 1 / math.sqrt(48))
    assert spec.rope is not None
    assert (spec.rope.dimensions, spec.rope.neox) == (16, False)
    assert latent("deepseek2-lite").query_rank == 0


@pytest.mark.parametrize(
    ("multiplier", "expected"), [(0.0707, 1 + 0.0707 * math.log(4)), (0.1, 1 + 0.1 * math.log(4))]
)
def test_yarn_multiplies_scores_by_the_square_of_its_magnitude(multiplier: float, expected: float) -> None:
    spec = latent("deepseek2-lite", rope__scaling__yarn_log_multiplier=multiplier)
    assert spec.scale == pytest.approx(expected**2 / math.sqrt(48))
    assert spec.rope is not None
    assert spec.rope.magnitude == pytest.approx(1)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention.kv_lora_rank", 40, "40, wanted a multiple of 32"),
        ("attention.kv_lora_rank", 2048, "2048, wanted a whole number from 1 to 1024"),
        ("attention.key_length_mla", 56, "40, wanted a multiple of 32 without the RoPE dimensions"),
        ("attention.value_length_mla", 40, "40, wanted a multiple of 16"),
        ("rope.dimension_count", 8, "8, wanted a multiple of 16"),
        ("rope.dimension_count", 48, "48, wanted a whole number from 2 to 47"),
        ("attention.q_lora_rank", -1, "-1, wanted a whole number from 0 to"),
        ("attention.temperature_scale", -0.1, "-0.1, wanted a finite number above 0"),
        ("expert_group_count", 8, "8, wanted 8 experts in groups of two or more"),
        ("rope.scaling.type", "linear", "'linear', wanted yarn"),
    ],
)
def test_unsupported_values_are_refused(key: str, value: object, expected: str) -> None:
    extra: dict[str, Any] = {key.replace(".", "__"): value, "rope__scaling__factor": 4.0}
    if key != "rope.scaling.type":
        extra["rope__scaling__type"] = "yarn"
    with pytest.raises(UnsupportedModelError) as caught:
        config_of("deepseek2", **extra)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"deepseek2.{key}: {expected}")


def test_experts_of_old_files_are_gated_by_a_softmax_without_a_bias() -> None:
    model = replace(ZOO["deepseek2-lite"], extra={})
    config = config_from_metadata(model.metadata(), VOCABULARY)
    experts = config.specification().specs(MoeSpec)[0]
    assert (experts.gating, experts.selection_bias, experts.normalized) == ("softmax", False, False)
    experts = config_of("deepseek2").specification().specs(MoeSpec)[0]
    assert (experts.gating, experts.selection_bias, experts.normalized, experts.scale) == (
        "sigmoid",
        True,
        True,
        2.5,
    )
    assert experts.shared_neurons == 64
