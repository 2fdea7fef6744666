"""Folders of Hugging Face give the logits of transformers, whatever their family, types and scalings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.hugging_face.families.table import FAMILIES as TABLE
from edgeinfer.hugging_face.opening import open_folder
from edgeinfer.planning.model_plan import plan_model
from tests.conftest import needs
from tests.edgeinfer.distances import distance
from tests.edgeinfer.hugging_face.random_folders import (
    FAMILIES,
    HEADS,
    IDS,
    logits_of,
    own_logits,
    random_model,
    write_folder,
)

pytest.importorskip("torch")

pytestmark = needs("transformers")


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    folder = write_folder(model, tmp_path / name)
    assert distance(own_logits(folder), logits_of(model, IDS)) < 1e-5


def test_every_family_of_the_table_is_compared_with_transformers() -> None:
    prefixes = {prefix for prefix, _ in FAMILIES.values()}
    tested = {HEADS.get(prefix, f"{prefix}ForCausalLM") for prefix in prefixes}
    assert TABLE.keys() - tested <= {"Gemma3TextModel", "Gemma3ForConditionalGeneration"}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_stay_as_they_are(tmp_path: Path, dtype: str) -> None:
    folder = write_folder(random_model("qwen3", dtype), tmp_path / "model")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert distance(own_logits(folder), logits_of(model, IDS)) < 1e-5
    with open_folder(folder) as file:
        kinds = {info.format.name for name, info in file.tensors.items() if len(info.shape) == 2}
    assert kinds == {"BF16" if dtype == "bfloat16" else "F16"}


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-attention": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_scalings_of_rope_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = random_model("llama", rope_parameters={"rope_theta": 5000.0, **ROPES[kind]})
    folder = write_folder(model, tmp_path / "model")
    assert distance(own_logits(folder), logits_of(model, IDS)) < 1e-5


def test_a_scaling_that_was_added_to_the_config_is_used(tmp_path: Path) -> None:
    """Many model cards tell how to add `rope_scaling`; transformers then ignores `rope_parameters`."""
    import transformers

    model = random_model("qwen3", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    folder = write_folder(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": ROPES["yarn"], "rope_theta": 5000.0}
    (folder / "config.json").write_text(json.dumps(config))
    added = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert distance(own_logits(folder), logits_of(added, IDS)) < 1e-5


def test_long_rope_takes_its_factors_by_the_context(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8).tolist()
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors[::-1]}
    model = random_model(
        "phi3", rope_parameters={**rope, "original_max_position_embeddings": 64},
        original_max_position_embeddings=64,
    )  # fmt: skip
    folder = write_folder(model, tmp_path / "model")
    assert distance(own_logits(folder, context=64), logits_of(model, IDS)) < 1e-5


def test_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    model = random_model("qwen2")
    folder = write_folder(model, tmp_path / "model", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert distance(own_logits(folder), logits_of(model, IDS)) < 1e-5


def test_large_computed_tensors_are_kept_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.hugging_face.computed_tensors.SMALL_BYTES", 1000)
    model = random_model("mixtral")
    folder = write_folder(model, tmp_path / "model")
    assert distance(own_logits(folder), logits_of(model, IDS)) < 1e-5
    assert distance(own_logits(folder, repack=False), logits_of(model, IDS)) < 1e-5


def test_a_folder_is_shown_as_one_and_not_passed_to_llama_cpp(tmp_path: Path) -> None:
    folder = write_folder(random_model("llama"), tmp_path / "model")
    with open_folder(folder) as file:
        assert (file.origin, file.version) == (folder, 0)
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp reads GGUF files only; convert the folder"):
        edgeinfer.load(folder, engine="llama.cpp")


def test_a_folder_is_planned_and_completes_text(tmp_path: Path) -> None:
    folder = write_folder(random_model("llama"), tmp_path / "a model")
    plan = plan_model(folder, device="cpu", threads=1)
    with edgeinfer.load(folder, device="cpu", threads=1) as model:
        assert model.name == plan.model == "a model"
        assert model.plan is not None
        assert model.plan.nbytes == plan.plan.nbytes
        assert len(model.generate("the quick", max_tokens=3, temperature=0.0).ids) == 3


def test_the_text_model_of_one_with_images_is_taken(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = random_model("gemma3")
    images = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.config,
        vision_config={**images, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    folder = write_folder(model, tmp_path / "model")
    assert distance(own_logits(folder), logits_of(text, IDS)) < 1e-5
