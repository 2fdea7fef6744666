"""Profiling a model: counts equal those of the reference, predictors name what is active, reports add up."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from edgeinfer.profiling.predictor_training import Samples, predictor_arrays, read_predictor, train
from edgeinfer.profiling.profiling import profile
from edgeinfer.profiling.recording import SeenRows, active_neurons, cpu_engine, record
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.sparse import dense_layer
from edgeinfer_offload.runtime.activity_profile import find_profile
from tests.kernels.row_matrices import random_matrix
from tests.model_zoo import ZOO

ARCEE = replace(ZOO["arcee"], width=64, feed_forward=96, formats=("Q8_0",), layers=2)
TEXT = "the heron ate in the rain on a stone " * 40


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return ARCEE.write(tmp_path / "m.gguf")


def test_counts_are_those_of_the_reference(path: Path) -> None:
    """Counted here in float64 from the recorded x; int8 activations may change a neuron at its threshold."""
    result = profile(path, [TEXT], tokens=300)
    assert sum(result.profile.tokens) == 300
    with edgeinfer.load(path, device="cpu", sparse="off") as model:
        ids = model.tokenizer.encode(TEXT)[:300]
        counts = np.zeros((2, 96))

        def seen(layer: int, rows: SeenRows) -> None:
            assert rows.normed is not None
            weights = dense_layer(cpu_engine(model)[1].weights, layer)
            exact = rows.normed.astype(np.float64) @ weights.ffn_up.decoded().astype(np.float64).T > 0
            assert (exact != rows.active).mean() < 0.01
            counts[layer] += rows.active.sum(axis=0)

        record(model, [ids[:150], ids[150:]], seen)
    for layer in range(2):
        assert np.array_equal(result.profile.counts[f"neurons.{layer}"].sum(axis=0), counts[layer])
    assert result.overall.active == pytest.approx(counts.sum() / (2 * 96 * 300))


def test_the_profile_is_stored_and_found(path: Path, tmp_path: Path) -> None:
    result = profile(path, [TEXT], tokens=128)
    stored = find_profile(path, tmp_path / "nowhere")
    assert stored is not None
    assert stored.rule == "not exactly zero"
    assert np.array_equal(stored.counts["neurons.1"], result.profile.counts["neurons.1"])
    assert len(result.layers) == 2
    assert result.predictors == ()


def test_without_a_text_the_model_generates_one(path: Path) -> None:
    result = profile(path, tokens=100)
    assert sum(result.profile.tokens) >= 100
    assert result.profile.tokens[1] > 0


def test_smooth_activations_count_by_magnitude(tmp_path: Path) -> None:
    hidden = np.array([[3.0, -3.0, 0.1, 0.0], [1.0, 1.0, 1.0, 1.0]], np.float32)
    assert active_neurons(hidden, "silu").tolist() == [[True, True, False, False], [True] * 4]
    assert active_neurons(hidden, "relu").tolist() == [[True, True, True, False], [True] * 4]
    llama = ZOO["llama"].write(tmp_path / "llama.gguf")
    result = profile(llama, [TEXT], tokens=64)
    assert result.profile.rule == "at least the root mean square of its row"
    assert 0.05 < result.overall.active < 0.6
    with pytest.raises(SettingError, match="predictors need a ReLU; its activation is silu"):
        profile(llama, [TEXT], tokens=64, predictor=True)


def test_options_out_of_range_are_refused(path: Path) -> None:
    with pytest.raises(SettingError, match="the text has 2 tokens, wanted at least 64"):
        profile(path, ["he"])
    with pytest.raises(SettingError, match="tokens: saw 10, wanted a whole number of at least 64"):
        profile(path, [TEXT], tokens=10)
    with pytest.raises(SettingError, match="rank: saw 33, wanted a multiple of 32"):
        profile(path, [TEXT], rank=33, predictor=True)


def low_rank_layer(neurons: int = 128, width: int = 64) -> tuple[FeedForwardWeights, Samples]:
    """A layer of rank 20 whose neurons are active for a fifth of the tokens, and its recorded samples."""
    random = np.random.default_rng(4)
    rows = random.standard_normal((neurons, 20)) @ random.standard_normal((20, width)) / 20
    up = random_matrix("Q8_0", neurons, width)
    from edgeinfer_quant_formats import encode

    up = replace(up, raw=encode(rows.astype(np.float32).reshape(-1), "Q8_0").reshape(neurons, -1))
    bias = (-0.84 * np.linalg.norm(rows, axis=1)).astype(np.float32)
    x = random.standard_normal((4000, width)).astype(np.float32)
    active = x @ up.decoded().T + bias > 0
    weights = FeedForwardWeights(up, random_matrix("Q8_0", width, neurons), ffn_up_bias=bias)
    return weights, Samples(x.astype(np.float16), np.packbits(active, axis=1))


def test_a_low_rank_layer_is_predicted_nearly_exactly() -> None:
    weights, samples = low_rank_layer()
    (result,) = train(weights, samples, [32])
    assert result.recall > 0.98
    assert result.named == pytest.approx(result.active, abs=0.02)
    assert result.predictor.rank == 32
    assert result.predictor.nbytes == 32 * 68 + 128 * 34 + 4 * 128


def test_predictors_are_restored_from_the_profile_and_others_are_refused() -> None:
    weights, samples = low_rank_layer()
    (result,) = train(weights, samples, [32])
    arrays = predictor_arrays(3, result)
    again = read_predictor(arrays, 3, weights.ffn_up)
    assert again is not None
    assert np.array_equal(again.predictor.second.raw, result.predictor.second.raw)
    assert (again.recall, again.named, again.active) == (result.recall, result.named, result.active)
    assert read_predictor(arrays, 2, weights.ffn_up) is None
    with pytest.raises(ValueError, match=r"predictor\.3\.second: uint8 \(128, 34\), wanted uint8 \(96, 34\)"):
        read_predictor(arrays, 3, random_matrix("Q8_0", 96, 64))
    arrays["predictor.3.bias"] = np.full(128, np.nan, np.float32)
    with pytest.raises(ValueError, match=r"predictor\.3: numbers that aren't finite"):
        read_predictor(arrays, 3, weights.ffn_up)


def test_predictors_are_trained_and_stored_with_the_profile(path: Path) -> None:
    result = profile(path, [TEXT], tokens=400, predictor=True, rank=32)
    assert len(result.predictors) == 2
    assert all(trained.recall > 0.9 for trained in result.predictors)
    with edgeinfer.load(path, device="cpu", sparse="predicted") as model:
        assert any("predicted, with a recall of" in line for line in model.details)
        assert model.plan is not None
        assert "layer 1 feed-forward, by neuron with a predictor" in [item.item for item in model.plan.items]


@pytest.mark.slow
def test_experts_are_counted_by_router_selection(tmp_path: Path) -> None:
    path = ZOO["qwen3moe"].write(tmp_path / "mixture.gguf")
    result = profile(path, [TEXT], tokens=100)
    assert "an expert that the router selected" in result.profile.rule
    for layer, counts in result.profile.layers("experts").items():
        with edgeinfer.load(path, device="cpu") as model:
            spec = cpu_engine(model)[0].specification.layers[layer].block_of(MoeSpec)
        assert counts.shape == (2, spec.experts)
        assert counts.sum() == 100 * spec.experts_per_token
        assert counts.max() <= max(result.profile.tokens)
    with pytest.raises(SettingError, match="predictors need a ReLU"):
        profile(path, [TEXT], tokens=100, predictor=True)


def test_generated_text_has_the_given_tokens_in_two_equal_parts(path: Path) -> None:
    profiling = profile(path, tokens=129, threads=1)
    assert profiling.profile.tokens == (64, 65)


def test_the_neurons_of_experts_are_counted_where_they_are_exactly_zero(tmp_path: Path, path: Path) -> None:
    hybrid = replace(ZOO["nemotron_h_moe"], width=256, expert_length=128, formats=("Q8_0",))
    result = profile(hybrid.write(tmp_path / "hybrid.gguf"), [TEXT], tokens=200)
    assert sorted(result.profile.counts) == ["expert_neurons.1", "expert_neurons.3", "experts.1", "experts.3"]
    uses, inside = (result.profile.layers(kind)[1].sum(0) for kind in ("experts", "expert_neurons"))
    assert uses.sum() == 3 * 200
    of_experts = inside.reshape(8, 128)
    assert (of_experts.max(1) <= uses).all()
    shares = [result.profile.share_in_experts(layer, 8, 3) or 0.0 for layer in (1, 3)]
    assert result.in_experts == pytest.approx(np.mean(shares))
    assert 0.3 < np.mean(shares) < 0.7
    silu = replace(ZOO["qwen3moe"], layers=1).write(tmp_path / "silu.gguf")
    assert profile(silu, [TEXT], tokens=64).in_experts is None
