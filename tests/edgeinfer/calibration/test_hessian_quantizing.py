"""GPTQ over a model: less divergence in ordinary files, experts, several architectures, resuming."""

from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.calibration.checkpoint import Checkpoint
from edgeinfer.calibration.hessian_quantizing import HessianQuantizer
from edgeinfer.calibration.hessians import InputCollector
from edgeinfer.calibration.layer_runs import EMBEDDING, LayerRuns
from edgeinfer.calibration.reference_model import reference_model
from edgeinfer.errors import SettingError
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.quantizer.mixes import find_mix
from edgeinfer_quant_formats.quantizer.quantizing import plan_quantization
from tests.edgeinfer.conftest import ZooFile

TEXT = "the heron ate in the rain on a stone and a fox saw it from the hill " * 40


def divergences(source: Path, *paths: Path) -> list[float]:
    with GGUFFile.open(source) as file:
        model = reference_model(file)
        runs = LayerRuns(model, model.windows(TEXT, 256))
        found = []
        for path in paths:
            with GGUFFile.open(path) as made:
                found.append(runs.divergence(reference_model(made), EMBEDDING))
    return found


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "name",
    [*("llama", "qwen3moe", "deepseek2", "command-r"), pytest.param("gemma3n", marks=pytest.mark.slow)],
)
def test_the_divergence_falls_at_equal_bytes(zoo_file: ZooFile, tmp_path: Path, name: str) -> None:
    source, nearest, ours = zoo_file(name), tmp_path / "nearest.gguf", tmp_path / "ours.gguf"
    edgeinfer.quantize(source, nearest, "Q4_0")
    edgeinfer.quantize(source, ours, "Q4_0", calibrate=TEXT)
    before, after = divergences(source, nearest, ours)
    assert after < before
    with GGUFFile.open(ours) as file, GGUFFile.open(nearest) as other:
        assert {key: info.format for key, info in file.tensors.items()} == {
            key: info.format for key, info in other.tensors.items()
        }
        assert not np.array_equal(file.raw("blk.1.attn_output.weight"), other.raw("blk.1.attn_output.weight"))
        assert file.metadata["general.file_type"] == 2
    assert not (tmp_path / "ours.gguf.partial").exists()


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_the_same_bytes(zoo_file: ZooFile, tmp_path: Path) -> None:
    source, whole, resumed = zoo_file("qwen3moe"), tmp_path / "whole.gguf", tmp_path / "resumed.gguf"
    edgeinfer.quantize(source, whole, "Q4_0", calibrate=TEXT)

    def interrupt(_: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        edgeinfer.quantize(source, resumed, "Q4_0", calibrate=TEXT, report=interrupt)
    assert not resumed.exists()
    assert (tmp_path / "resumed.gguf.partial").is_dir()
    with GGUFFile.open(source) as file:
        model = reference_model(file)
        partial = tmp_path / "resumed.gguf.partial"
        saved = Checkpoint(partial, (partial / "run.txt").read_text())
        quantizer = HessianQuantizer(model, plan_quantization(file, find_mix("Q4_0")), saved)
        before = sorted(path.name for path in partial.iterdir())
        quantizer.encode(model.windows(TEXT, 8192), None)
        assert len(quantizer.made) > len(before) // 2
    edgeinfer.quantize(source, resumed, "Q4_0", calibrate=TEXT)
    assert resumed.read_bytes() == whole.read_bytes()


def test_inputs_are_summed_once_for_matrices_that_share_them() -> None:
    raw = np.zeros((4, 8), np.uint8)
    one, other = Matrix("one", "F32", 4, 2, raw), Matrix("other", "F32", 4, 2, raw.copy())
    collector = InputCollector(["one", "other"])
    random = np.random.default_rng(2)
    rows = [random.standard_normal((3, 2)).astype(np.float32) for _ in range(4)]
    for part in rows:
        collector.seen(one, 0, part)
        collector.seen(other, 0, part)
        collector.seen(Matrix("third", "F32", 4, 2, raw), 0, part)
    assert collector.inputs["one", 0] is collector.inputs["other", 0]
    every = np.concatenate(rows)
    np.testing.assert_allclose(collector.inputs["one", 0].hessian(), every.T @ every, rtol=1e-5)
    assert ("third", 0) not in collector.inputs


@pytest.mark.slow
def test_a_goal_and_the_hessian_are_used_together(
    zoo_file: ZooFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fitted, both = tmp_path / "fitted.gguf", tmp_path / "both.gguf"
    for target, text in ((fitted, None), (both, TEXT)):
        edgeinfer.quantize(zoo_file("llama"), target, bits_per_weight=5.5, text=TEXT, calibrate=text)
    before, after = divergences(zoo_file("llama"), fitted, both)
    assert after < before
    assert both.stat().st_size <= fitted.stat().st_size * 1.01


def test_reordered_neurons_and_short_texts_are_refused(zoo_file: ZooFile, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="calibrate: not together with hot_first"):
        edgeinfer.quantize(zoo_file("llama"), tmp_path / "o.gguf", calibrate=TEXT, hot_first=True)
    with pytest.raises(SettingError, match="tokens, wanted at least 256"):
        edgeinfer.quantize(zoo_file("llama"), tmp_path / "o.gguf", "Q4_0", calibrate="a heron")
