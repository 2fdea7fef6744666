"""Models in the types below 4 bits that other programs write: the logits are those of llama.cpp."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.weights import SCALED
from edgeinfer.planning.model_plan import sizes_of
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.sizes.cuda_matrices import matrix_bytes
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from edgeinfer_quant_formats.formats import FORMATS
from tests.edgeinfer.distances import distance, median_distance
from tests.edgeinfer.make_logit_goldens import IDS, llama_cpp_logits, quantized
from tests.edgeinfer.test_logits_against_llama_cpp import logits_of
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

TYPES = ["NVFP4", "Q2_0", *(name for name, spec in FORMATS.items() if spec.grid)]
SCALED_MODELS = ["llama", "qwen3moe", pytest.param("qwen35", marks=pytest.mark.slow)]
DEFAULT = ("IQ2_XXS", "IQ3_S")
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in TYPES]


def model_file(folder: Path, name: str) -> Path:
    model = RandomModel("llama", width=256, layers=2, head_dim=64, feed_forward=512, formats=(name,))
    return model.write(folder / "model.gguf")


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_have_the_logits_of_the_formula(tmp_path: Path, name: str) -> None:
    path = model_file(tmp_path, name)
    ours, exact = logits_of(path, "cpu"), logits_of(path, "exact")
    assert np.isfinite(ours).all()
    assert distance(ours, exact) < 0.05


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_as_close_to_the_formula_as_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    path = model_file(tmp_path, name)
    ours, exact, theirs = logits_of(path, "cpu"), logits_of(path, "exact"), llama_cpp_logits(path, IDS)
    assert distance(theirs, exact) < 0.05
    assert distance(ours, exact) <= 2 * distance(theirs, exact)


def scaled_file(folder: Path, name: str) -> Path:
    """A model in NVFP4 whose matrices have factors; of one with experts, only those of the experts."""
    model = replace(quantized(ZOO[name]), formats=("NVFP4",))
    plain_path, path = model.write(folder / "plain.gguf"), folder / "scaled.gguf"
    random = np.random.default_rng(3)
    with GGUFFile.open(plain_path) as plain, GGUFWriter(path, plain.metadata) as writer:
        for tensor, info in plain.tensors.items():
            writer.add_tensor(tensor, plain.raw(tensor), info.format, info.shape)
            if SCALED.fullmatch(tensor) and (not model.experts or "_exps." in tensor):
                count, base = info.shape[0] if len(info.shape) == 3 else 1, tensor.removesuffix("weight")
                factors = random.uniform(0.5, 2, count).astype(np.float32)
                writer.add_tensor(f"{base}scale", factors, "F32")
                writer.add_tensor(f"{base}input_scale", factors, "F32")
    return path


@pytest.mark.parametrize("name", SCALED_MODELS)
def test_a_file_of_nvfp4_with_scale_tensors_has_the_logits_of_the_formula(tmp_path: Path, name: str) -> None:
    path = scaled_file(tmp_path, name)
    exact, without = logits_of(path, "exact"), logits_of(tmp_path / "plain.gguf", "exact")
    assert distance(without, exact) > 0.3
    assert median_distance(logits_of(path, "cpu"), exact) < 0.05


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", SCALED_MODELS)
def test_scale_tensors_mean_what_they_mean_to_llama_cpp(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    path = scaled_file(tmp_path, name)
    assert median_distance(llama_cpp_logits(path, IDS), logits_of(path, "exact")) < 0.05


def test_a_file_of_nvfp4_with_scale_tensors_has_no_kernels_on_a_gpu(tmp_path: Path) -> None:
    with GGUFFile.open(scaled_file(tmp_path, "llama")) as file:
        sizes = sizes_of(file)
    with pytest.raises(UnsupportedOnDeviceError, match=r"factor in output\.scale has no kernel on the GPU"):
        matrix_bytes(sizes.head)


def test_scales_of_other_types_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "scaled.gguf"
    with GGUFFile.open(model_file(tmp_path, "Q8_0")) as plain, GGUFWriter(path, plain.metadata) as writer:
        for name, info in plain.tensors.items():
            writer.add_tensor(name, plain.raw(name), info.format, info.shape)
        writer.add_tensor("blk.0.attn_q.scale", np.full(1, 0.5, np.float32), "F32")
    with pytest.raises(UnsupportedModelError, match=r"doesn't use blk\.0\.attn_q\.scale; llama\.cpp may"):
        edgeinfer.load(path, device="cpu", draft=None)
