"""Folders become GGUF files with the same logits, here and in llama.cpp."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from edgeinfer_quant_formats import GGUFFile
from tests.conftest import needs
from tests.edgeinfer.distances import distance
from tests.edgeinfer.hugging_face.random_folders import IDS, logits_of, own_logits, random_model, write_folder
from tests.edgeinfer.make_logit_goldens import llama_cpp_logits

pytest.importorskip("torch")

pytestmark = needs("transformers")


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_converted_folder_has_the_logits_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_folder(random_model(name, "bfloat16"), tmp_path / name)
    done = edgeinfer.convert(folder, tmp_path / "out.gguf")
    assert (done.source, done.warnings) == (folder, ())
    assert np.array_equal(own_logits(tmp_path / "out.gguf"), own_logits(folder))
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        kinds = {
            info.format.name
            for name, info in file.tensors.items()
            if "inp" not in name and len(info.shape) > 1
        }
        assert kinds == {"BF16"}
        assert file.metadata["general.name"] == name


def test_a_folder_is_converted_to_a_mix_of_formats(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = random_model("qwen2", **settings)
    folder = write_folder(model, tmp_path / "model")
    seen: list[tuple[int, int]] = []
    done = edgeinfer.convert(
        folder, tmp_path / "q.gguf", "Q8_0", progress=lambda *done: seen.append(done), threads=1
    )
    assert done.plan.mix.name == "Q8_0"
    assert seen[-1][0] == seen[-1][1]
    assert distance(own_logits(tmp_path / "q.gguf"), logits_of(model, IDS)) < 0.05


def test_a_file_is_not_converted(tmp_path: Path) -> None:
    folder = write_folder(random_model("llama"), tmp_path / "model")
    edgeinfer.convert(folder, tmp_path / "out.gguf")
    with pytest.raises(SettingError, match="is a GGUF file already; to change its type, quantize it"):
        edgeinfer.convert(tmp_path / "out.gguf", tmp_path / "other.gguf")
    with pytest.raises(SettingError, match="is there already"):
        edgeinfer.convert(folder, tmp_path / "out.gguf")


LLAMA_CPP = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "granite", "olmo2",
    "cohere2", "gpt2", "gptneox", "stablelm", "starcoder2", "mamba", "nemotron", "phi2",
)  # fmt: skip


@pytest.mark.llama_cpp
@pytest.mark.default_cases(3)
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_llama_cpp_reads_converted_files(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    usual_scale: dict[str, Any] = {"query_pre_attn_scalar": 16} if name == "gemma2" else {}
    model = random_model(name, **usual_scale)
    edgeinfer.convert(write_folder(model, tmp_path / "model"), tmp_path / "out.gguf")
    assert distance(llama_cpp_logits(tmp_path / "out.gguf", IDS), logits_of(model, IDS)) < 5e-3
