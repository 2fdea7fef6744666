"""Models in the types below 4 bits that other programs write: the logits are those of llama.cpp."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import UnsupportedModelError
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from edgeinfer_quant_formats.formats import FORMATS
from edgeinfer_quant_formats.quantizer.mixes import find_mix
from tests.edgeinfer.distances import distance, median_distance
from tests.edgeinfer.make_logit_goldens import IDS, llama_cpp_logits, quantized
from tests.edgeinfer.test_logits_against_llama_cpp import logits_of
from tests.model_zoo import ZOO
from tests.random_models import RandomModel
from tests.zoo.scaled_models import scaled

TYPES = ["NVFP4", "Q2_0", *(name for name, spec in FORMATS.items() if spec.grid)]
SCALED_MODELS = ["llama", "qwen3moe", pytest.param("qwen35", marks=pytest.mark.slow)]
DEFAULT = ("IQ2_XXS", "IQ3_S")
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in TYPES]


def model_file(folder: Path, name: str) -> Path:
    model = RandomModel("llama", width=256, layers=2, head_dim=64, feed_forward=512, formats=(name,))
    return model.write(folder / "model.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_the_kernels_have_the_logits_of_the_formula(tmp_path: Path, name: str) -> None:
    path = model_file(tmp_path, name)
    ours, exact = logits_of(path, "cpu"), logits_of(path, "exact")
    assert np.isfinite(ours).all()
    assert distance(ours, exact) < 0.05


@pytest.mark.slow
@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", TYPES)
def test_the_logits_are_as_close_to_the_formula_as_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    path = model_file(tmp_path, name)
    ours, exact, theirs = logits_of(path, "cpu"), logits_of(path, "exact"), llama_cpp_logits(path, IDS)
    assert distance(theirs, exact) < 0.05
    assert distance(ours, exact) <= 2 * distance(theirs, exact)


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", CASES[2:])
def test_llama_cpp_reads_the_files_that_are_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    source, path = model_file(tmp_path, "F32"), tmp_path / "small.gguf"
    with GGUFFile.open(source) as file, GGUFWriter(tmp_path / "imatrix.gguf") as writer:
        for tensor, info in file.tensors.items():
            writer.add_tensor(f"{tensor}.in_sum2", np.ones((1, info.shape[-1]), np.float32), "F32")
            writer.add_tensor(f"{tensor}.counts", np.ones((1, 1), np.float32), "F32")
    edgeinfer.quantize(source, path, name, importance=tmp_path / "imatrix.gguf")
    with GGUFFile.open(path) as file:
        assert file.tensors["blk.0.ffn_up.weight"].format.name == find_mix(name).base
    assert median_distance(llama_cpp_logits(path, IDS), logits_of(path, "exact")) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35"])
def test_a_file_of_nvfp4_with_scale_tensors_has_the_logits_of_the_formula(tmp_path: Path, name: str) -> None:
    path = scaled(quantized(ZOO[name])).write(tmp_path / "scaled.gguf")
    exact, without = logits_of(path, "exact"), logits_of(tmp_path / "plain.gguf", "exact")
    assert distance(without, exact) > 0.3
    assert median_distance(logits_of(path, "cpu"), exact) < 0.05


@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", SCALED_MODELS)
def test_scale_tensors_mean_what_they_mean_to_llama_cpp(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    path = scaled(quantized(ZOO[name])).write(tmp_path / "scaled.gguf")
    assert median_distance(llama_cpp_logits(path, IDS), logits_of(path, "exact")) < 0.05


def with_scale(path: Path, matrix: str, folder: Path) -> Path:
    """The file with a factor of one of its matrices."""
    target = folder / "scaled.gguf"
    with GGUFFile.open(path) as plain, GGUFWriter(target, plain.metadata) as writer:
        for name, info in plain.tensors.items():
            writer.add_tensor(name, plain.raw(name), info.format, info.shape)
        writer.add_tensor(f"{matrix}.scale", np.full(1, 0.5, np.float32), "F32")
    return target


def test_scales_of_other_types_are_refused_by_name(tmp_path: Path) -> None:
    path = with_scale(model_file(tmp_path, "Q8_0"), "blk.0.attn_q", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"doesn't use blk\.0\.attn_q\.scale; llama\.cpp may"):
        edgeinfer.load(path, device="cpu", draft=None)


@pytest.mark.parametrize("matrix", ["attn_q", "attn_gate"])
def test_a_scale_of_queries_that_alternate_with_their_gates_is_refused(tmp_path: Path, matrix: str) -> None:
    plain = replace(ZOO["afmoe"], formats=("NVFP4",)).write(tmp_path / "plain.gguf")
    path = with_scale(plain, f"blk.0.{matrix}", tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=rf"{matrix}.*can't be applied where rows of attn_q and attn_gate"
    ):
        edgeinfer.load(path, device="cpu", draft=None)
