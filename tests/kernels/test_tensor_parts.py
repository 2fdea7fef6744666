"""The parts of tensor parallel: how heads, neurons, experts and tokens are divided, and what can't be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.tensor_parts import TensorSplitError, divided, tensor_part, tensor_refusal
from edgeinfer_quant_formats import GGUFFile
from tests.model_zoo import ZOO
from tests.random_models import RandomModel


def read(model: RandomModel, folder: Path) -> tuple[DecoderSpec, DecoderWeights]:
    with GGUFFile.open(model.write(folder / "model.gguf")) as file:
        config = read_config(file)
        return config.specification(), read_weights(file, config)


@pytest.mark.parametrize(
    ("count", "unit", "shares", "lengths"),
    [
        (8, 1, (1, 1), [4, 4]),
        (8, 1, (3, 1), [6, 2]),
        (8, 2, (100, 1), [6, 2]),
        (14336, 512, (1, 1, 1), [4608, 5120, 4608]),
        (100, 16, (1, 1), [48, 52]),
        (4, 1, (1, 1000, 1, 1), [1, 1, 1, 1]),
    ],
)
def test_a_division_covers_all_in_units_by_share(
    count: int, unit: int, shares: tuple[float, ...], lengths: list[int]
) -> None:
    ranges = divided(count, unit, shares, "things")
    assert [len(each) for each in ranges] == lengths
    assert [index for each in ranges for index in each] == list(range(count))


def test_too_few_units_are_refused() -> None:
    with pytest.raises(TensorSplitError, match=r"^2 key heads can't be divided among 3 GPUs$"):
        divided(2, 1, (1, 1, 1), "key heads")
    with pytest.raises(TensorSplitError, match=r"^96 neurons in groups of 64 can't be divided among 2 GPUs$"):
        divided(96, 64, (1, 1), "neurons")


def test_the_parts_of_all_ranks_are_the_whole_model(tmp_path: Path) -> None:
    model = replace(ZOO["llama-tied-biases"], biases=("attn_q", "attn_output", "ffn_down"))
    spec, weights = read(model, tmp_path)
    parts = [tensor_part(spec, weights, (2, 1), rank) for rank in range(2)]
    for index in spec.indices():
        whole = weights.residual(index).block
        held = [part.residual(index).block for _, part, _ in parts]
        if index.position == 0:
            for name in ("attn_q", "attn_k", "attn_v"):
                rows = [getattr(each, name).decoded() for each in held]
                np.testing.assert_array_equal(np.concatenate(rows), getattr(whole, name).decoded())
            columns = [each.attn_output.decoded() for each in held]
            np.testing.assert_array_equal(np.concatenate(columns, 1), whole.attn_output.decoded())
            np.testing.assert_array_equal(
                np.concatenate([each.attn_q_bias for each in held]), whole.attn_q_bias
            )
            assert [each.attn_output_bias is None for each in held] == [False, True]
        else:
            assert [each.ffn_down.columns for each in held] == [64, 32]
            assert [each.ffn_down_bias is None for each in held] == [False, True]
    assert [own.vocabulary_size for own, _, _ in parts] == [192, 96]
    assert parts[1][2].vocabulary == (range(192), range(192, 288))


def test_experts_are_divided_and_the_router_is_whole(tmp_path: Path) -> None:
    spec, weights = read(ZOO["qwen2moe"], tmp_path)
    parts = [tensor_part(spec, weights, (1, 1), rank) for rank in range(2)]
    count = spec.layers[0].blocks[1].block.experts
    for own, held, part in parts:
        block = held.layers[0].blocks[1].block
        assert block.ffn_gate_inp.rows == own.layers[0].blocks[1].block.experts == count
        here, there = part.shards(own, 0)
        assert block.ffn_up_exps.experts == len(here.experts)
        assert sorted(here.experts + there.experts) == list(range(count))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", ""),
        ("gemma3", ""),
        ("gpt-oss", ""),
        ("olmo2", "a norm of all heads (layer 0)"),
        ("gemma3n", "layers read keys, values or inputs of other layers"),
        ("qwen35", "gated delta net (layer 0)"),
        ("deepseek2", "latent attention (layer 0)"),
        ("gemma4-moe", "norms of the sums of experts (layer 0)"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    spec, weights = read(ZOO[name], tmp_path)
    assert tensor_refusal(spec) == reason
    if reason:
        with pytest.raises(TensorSplitError, match="its layers can't be divided among GPUs: "):
            tensor_part(spec, weights, (1, 1), 0)
