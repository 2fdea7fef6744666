"""The MoE specification from metadata and tensors, and a one-line error for each unsupported one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.model_config.test_model_weights import Altered, refusal, weights_of
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel


def metadata_of(name: str, without: str = "", **changed: Any) -> dict[str, Any]:
    model = ZOO[name]
    metadata = {**model.metadata(), **{f"{model.architecture}.{key}": v for key, v in changed.items()}}
    metadata.pop(f"{model.architecture}.{without}", None)
    return metadata


def config_of(name: str, without: str = "", **changed: Any) -> ModelConfig:
    return config_from_metadata(metadata_of(name, without, **changed), VOCABULARY)


def moe_spec(config: ModelConfig) -> MoeSpec:
    return config.specification().layers[-1].block_of(MoeSpec)


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("qwen3moe", "expert_count", 0, "0, wanted a whole number from 1 to 1024"),
        ("qwen3moe", "expert_count", 1 << 20, "1048576, wanted a whole number from 1 to 1024"),
        ("mixtral", "expert_count", -4, "-4, wanted a whole number from 0 to 1024"),
        ("mixtral", "expert_used_count", 5, "5, wanted a whole number from 1 to 4"),
        ("mixtral", "expert_used_count", 0, "0, wanted a whole number from 1 to 4"),
        ("mixtral", "expert_used_count", None, "missing, wanted a whole number from 1 to 4"),
        ("mixtral", "expert_used_count", np.array([2, 1, 2]), "array([2, 1, 2]), wanted a whole number"),
        ("mixtral", "expert_group_count", 2, "2, wanted no groups of experts"),
        ("bailingmoe2", "expert_group_count", 5, "5, wanted 12 experts in groups of two or more"),
        ("bailingmoe2", "expert_group_count", 12, "12, wanted 12 experts in groups of two or more"),
        ("bailingmoe2", "expert_group_used_count", 0, "0, wanted a whole number from 1 to 4"),
        ("bailingmoe2", "expert_group_used_count", None, "missing, wanted a whole number from 1 to 4"),
        ("bailingmoe2", "expert_used_count", 13, "13, wanted a whole number from 1 to 12"),
        ("dots1", "expert_gating_func", None, "missing, wanted a whole number from 1 to 3"),
        ("olmoe", "expert_weights_scale", -1.0, "-1.0, wanted a finite number above 0"),
        ("qwen3moe", "expert_feed_forward_length", 0, "0, wanted a whole number from 1"),
        ("qwen2moe", "expert_shared_feed_forward_length", "x", "'x', wanted a whole number from 0"),
        ("smallthinker", "expert_gating_func", 4, "4, wanted a whole number from 1 to 3"),
        ("smallthinker", "expert_gating_func", None, "missing, wanted a whole number from 1 to 3"),
        ("qwen3moe", "leading_dense_block_count", 9, "9, wanted a whole number from 0 to 3"),
        ("kimi-linear", "expert_gating_func", None, "missing, wanted a whole number from 1 to 3"),
        ("kimi-linear", "expert_group_count", 2, "2, wanted no groups of experts"),
        ("kimi-linear", "kda.head_dim", 40, "40, wanted a multiple of 16"),
        ("kimi-linear", "kda.head_dim", None, "missing, wanted a whole number from 1 to 1024"),
        ("kimi-linear", "ssm.conv_kernel", 1, "1, wanted a whole number from 2 to 32"),
        ("kimi-linear", "attention.kv_lora_rank", None, "missing, wanted a whole number from 1 to 1024"),
        ("gemma4", "attention.value_length_swa", 32, "32, wanted the key length 16"),
        (
            "gemma4",
            "attention.shared_kv_layers",
            3,
            "3, wanted layer 1 to have the window and heads of layer 2",
        ),
        ("gemma4-per-layer", "attention.shared_kv_layers", 5, "5, wanted a whole number from 0 to 4"),
        ("gemma4-per-layer", "embedding_length_per_layer_input", 24, "24, wanted a multiple of 16"),
        ("qwen3moe", "moe_latent_size", 32, "32, wanted experts without a latent projection"),
        ("nemotron_h_moe", "moe_latent_size", 40, "40, wanted a multiple of 16"),
        ("nemotron_h_moe", "moe_latent_size", 80, "80, wanted a whole number from 0 to 64"),
    ],
)
def test_a_bad_key_is_named_with_its_value_and_the_expected_one(
    name: str, key: str, value: Any, expected: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        config_of(name, **{key: value})
    assert str(caught.value).startswith(f"{ZOO[name].architecture}.{key}: {expected}")
    assert "\n" not in str(caught.value)


def test_an_architecture_without_experts_refuses_them() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"gemma\.expert_count: 8, wanted a whole number from 0 to 0"
    ):
        config_from_metadata(RandomModel("gemma", experts=8).metadata(), VOCABULARY)
    assert config_of("llama", expert_count=0).experts is None


def test_each_architecture_has_its_expert_gating() -> None:
    result = {name: moe_spec(config_of(name)) for name, model in ZOO.items() if model.experts}
    gatings = {name: (s.gating, s.normalized, s.pre_attention_router) for name, s in result.items()}
    assert gatings == {
        "afmoe": ("sigmoid", True, False),
        "bailingmoe": ("softmax", True, False),
        "bailingmoe2": ("sigmoid", True, False),
        "deepseek": ("softmax", False, False),
        "deepseek2": ("sigmoid", True, False),
        "deepseek2-groups": ("softmax", False, False),
        "deepseek2-lite": ("softmax", False, False),
        "dots1": ("sigmoid", True, False),
        "ernie4_5-moe": ("softmax", True, False),
        "exaone-moe": ("sigmoid", True, False),
        "gemma4-moe": ("softmax", True, False),
        "glm4moe": ("sigmoid", True, False),
        "glm4moe-unnormed": ("sigmoid", False, False),
        "gpt-oss": ("softmax_of_selected", False, False),
        "granitehybrid-moe": ("softmax", True, False),
        "granitemoe": ("softmax", True, False),
        "granitemoe-shared": ("softmax", True, False),
        "hunyuan-moe": ("softmax", True, False),
        "jamba-moe": ("softmax", False, False),
        "kimi-linear": ("sigmoid", True, False),
        "kimi-linear-wide-heads": ("sigmoid", True, False),
        "lfm2moe": ("sigmoid", True, False),
        "llama4": ("sigmoid", False, False),
        "laguna": ("sigmoid", True, False),
        "laguna-gates-of-elements": ("sigmoid", True, False),
        "mimo2": ("sigmoid", True, False),
        "mimo2-fused": ("sigmoid", True, False),
        "step35": ("sigmoid", True, False),
        "mistral4": ("softmax", True, False),
        "minimax-m2": ("sigmoid", True, False),
        "mixtral": ("softmax", True, False),
        "nemotron_h_moe": ("sigmoid", True, False),
        "nemotron_h_moe-latent": ("sigmoid", True, False),
        "olmoe": ("softmax", False, False),
        "phimoe": ("softmax", True, False),
        "qwen2moe": ("softmax", False, False),
        "qwen35moe": ("softmax", True, False),
        "qwen35moe-fused": ("softmax", True, False),
        "qwen3moe": ("softmax", True, False),
        "qwen3vlmoe": ("softmax", True, False),
        "mellum": ("softmax", True, False),
        "qwen3next": ("softmax", True, False),
        "qwen3next-legacy": ("softmax", True, False),
        "smallthinker": ("sigmoid", True, True),
        "smallthinker-softmax": ("softmax", True, True),
    }
    assert config_of("granitemoe").residual_scale == 0.22
    assert moe_spec(config_of("olmoe", expert_weights_scale=2.5)).scale == 2.5


def test_omitted_expert_sizes_follow_from_the_feed_forward_size() -> None:
    experts = config_of("qwen3moe", "expert_feed_forward_length", feed_forward_length=200).experts
    assert experts is not None
    assert experts.feed_forward == 200 // 5
    experts = config_of("qwen2moe", "expert_shared_feed_forward_length").experts
    assert experts is not None
    assert experts.shared == 96
    experts = config_of("mixtral").experts
    assert experts is not None
    assert (experts.feed_forward, experts.shared) == (96, 0)
    assert config_of("gpt-oss", "feed_forward_length").experts is not None


def test_experts_are_selected_from_groups() -> None:
    spec = moe_spec(config_of("bailingmoe2"))
    assert (spec.groups, spec.groups_per_token, spec.selection_bias) == (4, 2, True)
    for groups in (0, 1):
        spec = moe_spec(config_of("bailingmoe2", expert_group_count=groups))
        assert (spec.groups, spec.groups_per_token) == (1, 1)
    expected = r"expert_group_used_count: 1, wanted groups with 3 experts for a token"
    with pytest.raises(UnsupportedModelError, match=expected):
        config_of("bailingmoe2", expert_group_count=6, expert_group_used_count=1)
    expected = r"expert_group_count: 4, wanted no groups of experts with gating function 3"
    with pytest.raises(UnsupportedModelError, match=expected):
        config_of("bailingmoe2", expert_gating_func=3)


def test_a_softmax_may_have_a_bias_of_the_selection() -> None:
    assert moe_spec(config_of("ernie4_5-moe")).selection_bias
    assert not moe_spec(config_of("hunyuan-moe")).selection_bias
    with pytest.raises(ValueError, match="softmax of the selected experts and ranks"):
        MoeSpec("silu", 8, 2, 32, "softmax_of_selected", normalized=False, selection_bias=True)


def test_a_length_of_one_shared_expert_is_multiplied_by_their_number() -> None:
    for name, expected in (("bailingmoe2", 96), ("dots1", 32)):
        experts = config_of(name, expert_shared_count=3).experts
        assert experts is not None
        assert experts.shared == expected


def test_queries_and_keys_are_normalized_if_the_file_has_the_norms(tmp_path: Path) -> None:
    for name, expected in (("glm4moe", "head"), ("glm4moe-unnormed", "none")):
        path = ZOO[name].write(tmp_path / f"{name}.gguf")
        with GGUFFile.open(path) as file:
            config = read_config(file)
            assert {spec.qk_norm for spec in config.specification().specs(AttentionSpec)} == {expected}
            assert read_weights(file, config)


def test_leading_layers_may_be_dense() -> None:
    layers = config_of("qwen3moe", leading_dense_block_count=2).specification().layers
    kinds = [type(layer.blocks[1].block) for layer in layers]
    assert kinds == [FeedForwardSpec] * 2 + [MoeSpec]


def test_smallthinker_has_positions_in_windows_only_and_everywhere_without_windows() -> None:
    layers = config_of("smallthinker").specification().layers
    assert [layer.block_of(AttentionSpec).window for layer in layers] == [0, 4096, 4096, 4096, 0]
    assert [layer.block_of(AttentionSpec).rope is None for layer in layers] == [
        True,
        False,
        False,
        False,
        True,
    ]
    layers = config_of("smallthinker-softmax").specification().layers
    assert not any(
        layer.block_of(AttentionSpec).window or layer.block_of(AttentionSpec).rope is None for layer in layers
    )


def test_every_expert_is_a_slice_of_the_stack(tmp_path: Path) -> None:
    path = ZOO["gpt-oss"].write(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file:
        config = read_config(file)
        weights = read_weights(file, config).layers[1].block_of(MoeWeights)
        stack, bias = file.decode("blk.1.ffn_down_exps.weight"), file.decode("blk.1.ffn_down_exps.bias")
        for index in (0, 5):
            expert = weights.expert(index)
            assert np.array_equal(expert.ffn_down.decoded(), stack[index])
            assert expert.ffn_down_bias is not None
            assert np.array_equal(expert.ffn_down_bias, bias[index])


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "expected"),
    [
        ("mixtral", "blk.0.ffn_up_exps.weight", (4, 96, 32), "(4, 96, 64)"),
        ("mixtral", "blk.0.ffn_up_exps.weight", (3, 96, 64), "(4, 96, 64)"),
        ("mixtral", "blk.2.ffn_down_exps.weight", (4, 64 * 96), "(4, 64, 96)"),
        ("qwen3moe", "blk.1.ffn_gate_inp.weight", (15, 64), "(16, 64)"),
        ("gpt-oss", "blk.1.attn_sinks.weight", (5,), "(4,)"),
        ("gpt-oss", "blk.0.ffn_gate_exps.bias", (5, 96), "(576,)"),
        ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight", (63,), "(64,)"),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_quoted(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...], expected: str
) -> None:
    model = Altered(**vars(ZOO[name]), altered={tensor: shape})
    assert refusal(tmp_path, model) == f"{tensor}: shape {shape}, wanted {expected}"


@pytest.mark.parametrize("tensor", ["blk.1.ffn_gate_exps.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, tensor: str) -> None:
    text = refusal(tmp_path, Altered(**vars(ZOO["mixtral"]), altered={tensor: None}))
    assert text.startswith(f"{tensor} is missing: architecture llama")


def test_a_shared_expert_that_the_metadata_do_not_name_is_refused(tmp_path: Path) -> None:
    extra: dict[str, tuple[int, ...]] = {"blk.0.ffn_up_shexp.weight": (32, 64)}
    text = refusal(tmp_path, Altered(**vars(ZOO["granitemoe"]), altered=extra))
    assert text.startswith("architecture granitemoe doesn't use blk.0.ffn_up_shexp.weight")
    assert weights_of(replace(ZOO["granitemoe"], shared_length=32).write(tmp_path / "other.gguf"))


def test_experts_of_kimi_linear_follow_dense_layers() -> None:
    config = config_of("kimi-linear")
    assert config.experts_of(0) is None
    experts = config.experts_of(1)
    assert experts is not None
    assert (experts.scale, experts.shared) == (2.5, 32)
