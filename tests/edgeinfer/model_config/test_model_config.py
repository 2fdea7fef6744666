"""The model config from an architecture's metadata, and the error for every unsupported key."""

import math
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.temperature import NO_TEMPERATURE
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel


def config_of(architecture: str, **extra: Any) -> ModelConfig:
    """The config of a small model; a key's dots are written as two underscores."""
    keys = {key.replace("__", "."): value for key, value in extra.items()}
    return config_from_metadata(RandomModel(architecture, extra=keys).metadata(), VOCABULARY)


def refusal(architecture: str = "llama", **extra: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        config_of(architecture, **extra)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["dbrx", "", "llama\nllama", "x" * 5000])
def test_an_unknown_architecture_is_named_with_the_alternative(architecture: str) -> None:
    metadata = {"general.architecture": architecture}
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_metadata(metadata, VOCABULARY)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    assert architecture[:5].split("\n")[0] in text
    assert f"one of the {len(ARCHITECTURES)} that edgeinfer runs" in text
    assert "engine='llama.cpp'" in text


def test_a_file_without_an_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture \(none\) isn't one"):
        config_from_metadata({}, VOCABULARY)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block_count", 0, "0, wanted a whole number from 1 to 4096"),
        ("block_count", 1 << 40, "1099511627776, wanted a whole number from 1 to 4096"),
        ("block_count", None, "missing, wanted a whole number from 1 to 4096"),
        ("embedding_length", True, "True, wanted a whole number from 1 to 1048576"),
        ("embedding_length", 64.0, "64.0, wanted a whole number"),
        ("context_length", -5, "-5, wanted a whole number from 1 to"),
        ("attention.head_count", 0, "0, wanted a positive number, or one for each of 3 layers"),
        ("attention.head_count", np.array([4, 4], np.int32), "array([4, 4], dtype=int32), wanted a positive"),
        ("feed_forward_length", "96", "'96', wanted a positive number"),
        ("feed_forward_length", np.array([96, 0, 96]), "wanted a positive number, or one for each of 3"),
        ("attention.key_length", 0, "0, wanted a whole number from 1 to 4096"),
        ("attention.value_length", 8, "8, wanted the key length 16"),
        ("rope.dimension_count", 18, "18, wanted a whole number from 2 to 16"),
        ("rope.dimension_count", 1, "1, wanted a whole number from 2 to 16"),
        ("rope.freq_base", math.nan, "nan, wanted a finite number above 1"),
        ("rope.freq_base", 0.0, "0.0, wanted a finite number above 1"),
        ("rope.scaling.type", "su", "'su', wanted one of none, linear, yarn, longrope"),
        ("rope.scaling.factor", -2.0, "-2.0, wanted a finite number above 0"),
        ("rope.scaling.factor", math.inf, "inf, wanted a finite number above 0"),
        ("rope.scaling.attn_factor", 0.0, "0.0, wanted a finite number above 0"),
        ("rope.scaling.yarn_beta_fast", 0.0, "0.0, wanted a finite number above 0"),
        ("rope.scaling.original_context_length", 0, "0, wanted a whole number from 1"),
        ("attention.layer_norm_rms_epsilon", "small", "'small', wanted a finite number above 0"),
        ("attention.scale", -1.0, "-1.0, wanted a finite number above 0"),
        ("logit_scale", "x" * 10_000, "wanted a finite number above 0"),
    ],
)
def test_a_bad_key_is_named_with_its_value_and_the_expected_one(key: str, value: Any, expected: str) -> None:
    text = refusal(**{key: value})
    assert text.startswith(f"llama.{key}: ")
    assert expected in text
    assert len(text) < 400


def test_heads_that_cannot_share_their_keys_are_refused() -> None:
    text = refusal(attention__head_count=4, attention__head_count_kv=3)
    assert text == "llama.attention.head_count: 4 heads can't share 3 key heads"


def test_heads_and_sizes_may_differ_between_layers() -> None:
    config = config_of(
        "llama",
        attention__head_count=np.array([4, 2, 4], np.int32),
        attention__head_count_kv=np.array([2, 1, 4], np.int32),
        feed_forward_length=np.array([96, 32, 64], np.int32),
    )
    specs = config.specification().specs(AttentionSpec)
    assert [(spec.heads, spec.kv_heads) for spec in specs] == [(4, 2), (2, 1), (4, 4)]
    assert [shape.feed_forward for shape in config.shapes] == [96, 32, 64]


def test_a_missing_kv_head_count_equals_the_head_count() -> None:
    metadata = RandomModel("llama").metadata()
    del metadata["llama.attention.head_count_kv"]
    config = config_from_metadata(metadata, VOCABULARY)
    assert {(shape.heads, shape.kv_heads) for shape in config.shapes} == {(4, 4)}


def windows_of(architecture: str, layers: int, **extra: Any) -> list[int]:
    model = RandomModel(architecture, layers=layers, extra={"attention.sliding_window": 6, **extra})
    specification = config_from_metadata(model.metadata(), VOCABULARY).specification()
    return [layer.block_of(AttentionSpec).window for layer in specification.layers]


def test_windows_follow_the_architectures_pattern() -> None:
    assert windows_of("gemma2", 4) == [6, 0, 6, 0]
    assert windows_of("gemma3", 7) == [6, 6, 6, 6, 6, 0, 6]
    assert windows_of("llama", 2) == [0, 0]


def test_the_file_may_list_the_windowed_layers() -> None:
    key = "attention.sliding_window_pattern"
    assert windows_of("gemma3", 4, **{key: 2}) == [6, 0, 6, 0]
    assert windows_of("gemma3", 4, **{key: 0}) == [6, 6, 6, 6]
    assert windows_of("gemma3", 3, **{key: np.array([True, False, False])}) == [6, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "seen"),
    [
        (np.array([True, False]), "2 values of bool, wanted true or false for each of 3 layers"),
        (np.array([0.5, 1, 1]), "3 values of float64, wanted true or false for each of 3 layers"),
        (-1, "-1, wanted a whole number from 0"),
        ("all", "'all', wanted a whole number from 0"),
    ],
)
def test_a_window_pattern_that_fits_no_layers_is_refused(pattern: Any, seen: str) -> None:
    text = refusal("gemma3", attention__sliding_window=6, attention__sliding_window_pattern=pattern)
    assert text == f"gemma3.attention.sliding_window_pattern: {seen}" + (
        " to 2147483648" if "whole number" in seen else ""
    )


def test_the_last_of_every_four_layers_of_smollm3_has_no_positions() -> None:
    layers = config_of("smollm3").specification().layers
    assert [layer.block_of(AttentionSpec).rope is None for layer in layers] == [False] * 3
    layers = config_from_metadata(ZOO["smollm3"].metadata(), VOCABULARY).specification().layers
    assert [layer.block_of(AttentionSpec).rope is None for layer in layers] == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_scales_and_caps_reach_the_specification() -> None:
    config = config_of(
        "granite", logit_scale=4.0, residual_scale=0.5, embedding_scale=3.0, attention__scale=0.1
    )
    specification = config.specification()
    assert (specification.logit_scale, specification.embedding_scale) == (0.25, 3.0)
    assert specification.layers[0].block_of(AttentionSpec).scale == 0.1
    assert [each.residual_scale for each in specification.layers[0].blocks] == [0.5, 0.5]
    gemma = config_of("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0).specification()
    assert (gemma.layers[0].block_of(AttentionSpec).soft_cap, gemma.logit_soft_cap) == (20.0, 10.0)
    assert gemma.embedding_scale == 8.0


def test_gemma2_caps_its_logits_by_default() -> None:
    gemma = config_of("gemma2").specification()
    assert (gemma.layers[0].block_of(AttentionSpec).soft_cap, gemma.logit_soft_cap) == (50.0, 30.0)
    uncapped = config_of("gemma2", final_logit_softcapping=0.0).specification()
    assert uncapped.logit_soft_cap == 0.0
    assert config_of("gemma3").specification().logit_soft_cap == 0.0


def test_gemma2_of_46_layers_scales_queries_by_hidden_size_over_heads() -> None:
    small = config_from_metadata(RandomModel("gemma2", layers=2).metadata(), VOCABULARY)
    large = config_from_metadata(RandomModel("gemma2", layers=46, head_dim=8).metadata(), VOCABULARY)
    assert small.query_scale == 1 / math.sqrt(16)
    assert large.query_scale == 1 / math.sqrt(64 // 4)


def test_exaone4_has_rope_in_windowed_layers_only_and_everywhere_without_windows() -> None:
    windowed = config_of("exaone4", block_count=5, attention__sliding_window=6).specification()
    specs = windowed.specs(AttentionSpec)
    assert [spec.window for spec in specs] == [6, 6, 6, 0, 6]
    assert [spec.rope is None for spec in specs] == [False, False, False, True, False]
    specs = config_of("exaone4").specification().specs(AttentionSpec)
    assert not any(spec.window or spec.rope is None for spec in specs)


def test_sections_of_positions_determine_which_pairs_glm4_rotates() -> None:
    assert not config_of("glm4").rope_neox
    assert not config_of("glm4", rope__dimension_sections=[0, 0, 0, 0]).rope_neox
    assert config_of("glm4", rope__dimension_sections=[2, 3, 3, 0]).rope_neox
    assert not config_of("llama", rope__dimension_sections=[2, 3, 3, 0]).rope_neox


def test_the_temperature_of_queries_grows_with_whole_original_contexts() -> None:
    keys = {"attention__temperature_scale": 0.1, "rope__scaling__original_context_length": 16}
    (spec, *_) = config_of("mistral3", **keys).specification().specs(AttentionSpec)
    factors = spec.temperature.factors(np.array([0, 15, 16, 47]))
    assert factors.tolist() == [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    (plain, *_) = config_of("llama", **keys).specification().specs(AttentionSpec)
    assert plain.temperature == NO_TEMPERATURE


def test_scalings_that_a_norm_after_rope_does_not_permit_are_refused() -> None:
    text = refusal("hunyuan-dense", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert text == "hunyuan-dense.rope.scaling.type: 'yarn', wanted a scaling that keeps the length of heads"
    text = refusal("hunyuan-dense", rope__scaling__alpha=1000.0)
    assert text == "hunyuan-dense.rope.scaling.alpha: 1000.0, wanted 0, a base that includes it"
    specs = config_of("hunyuan-dense").specification().specs(AttentionSpec)
    assert all(spec.norm_after_rope and spec.qk_norm == "head" for spec in specs)


def test_logit_scales_multiply_or_divide_by_architecture() -> None:
    assert config_of("command-r", logit_scale=0.0625).logit_scale == 0.0625
    assert config_of("granite", logit_scale=16.0).logit_scale == 0.0625
    assert config_of("command-r").logit_scale == 1.0


def test_the_feed_forward_is_the_first_of_parallel_blocks_and_attention_reads_its_norm() -> None:
    for layer in config_of("command-r").specification().layers:
        feed_forward, attention = layer.blocks
        assert isinstance(attention.block, AttentionSpec)
        assert (feed_forward.norm_name, attention.norm_name) == ("attn_norm", "")
        assert layer.has_shared_norm(0)
        assert not layer.has_shared_norm(1)


def test_a_clamp_of_queries_keys_and_values_is_read_where_llama_cpp_reads_it() -> None:
    assert refusal(attention__clamp_kqv=8.0) == "llama.attention.clamp_kqv: 8.0, wanted 0, no clamp"
    assert config_of("olmo", attention__clamp_kqv=8.0).clamp == 8.0
    assert config_of("olmo", attention__clamp_kqv=0.0).norm.has_weights is False


def test_layers_without_kv_heads_of_kimi_linear_have_delta_attention() -> None:
    config = config_from_metadata(ZOO["kimi-linear"].metadata(), VOCABULARY)
    blocks = [layer.blocks[0].block for layer in config.specification().layers]
    kinds = [type(block) for block in blocks]
    assert kinds == [*2 * [KimiDeltaAttentionSpec], LatentAttentionSpec, KimiDeltaAttentionSpec]
    assert isinstance(blocks[2], LatentAttentionSpec)
    assert blocks[2].rope is None


def test_baichuan_has_alibi_or_rope_by_its_number_of_layers() -> None:
    larger, smaller = config_of("baichuan", block_count=40), config_of("baichuan", block_count=32)
    assert (larger.alibi, larger.has_rope) == (8.0, False)
    assert (smaller.alibi, smaller.has_rope) == (0.0, True)
    assert "baichuan.block_count: 3, wanted 32 layers (7B, with RoPE) or 40" in refusal("baichuan")


def test_only_files_with_the_key_have_parallel_blocks_with_own_norms() -> None:
    parallel = config_of("gptneox", use_parallel_residual=True).specification().layers[0].blocks
    assert [each.has_own_norm for each in parallel] == [False, True]
    assert [each.norm_name for each in parallel] == ["ffn_norm", "attn_norm"]
    in_order = config_of("gptneox", use_parallel_residual=False).specification().layers[0].blocks
    assert [each.norm_name for each in in_order] == ["attn_norm", "ffn_norm"]
    assert not any(each.shares_input for each in in_order)


def test_minicpm_has_scales_by_default() -> None:
    config = config_of("minicpm")
    assert (config.embedding_scale, config.logit_scale) == (12.0, 64 / 256)
    assert config.residual_scale == pytest.approx(1.4 / 3**0.5)
