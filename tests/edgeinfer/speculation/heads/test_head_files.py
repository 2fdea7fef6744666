"""Draft heads (MTP) in separate files, as llama.cpp's converters write them, and those next to a model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError, UnsupportedModelError
from edgeinfer.loading.draft_file import DraftTarget, open_draft
from edgeinfer.model_config.layers.draft_head import head_count, read_draft_head
from edgeinfer.model_config.support import model_support
from edgeinfer.model_config.weights import is_head_file, read_config, read_weights
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.heads.several_heads import SeveralHeads
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of
from tests.edgeinfer.speculation.heads.head_files import split_heads
from tests.edgeinfer.speculation.heads.random_heads import mimo_heads, nemotron_head, step_heads
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

PROMPT = "Once upon a time, there was a little fox."
MODELS: dict[str, RandomModel] = {
    **{
        name: replace(ZOO[name], layers=4, draft_head=True)
        for name in ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")
    },
    "nemotron_h_moe": nemotron_head(),
    "step35": step_heads(),
    "mimo2": mimo_heads(own_outputs=True),
}


@pytest.fixture(scope="module", params=["qwen35", "glm4moe", "step35"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with its draft heads; next to it, in other folders, those of its two parts."""
    name = request.param
    path = MODELS[name].write(tmp_path_factory.mktemp(name) / "whole.gguf")
    for folder in ("alone", "together"):
        (path.parent / folder).mkdir()
    alone = path.parent / "alone"
    split_heads(path, alone / "model-Q8_0.gguf", path.parent / "heads.gguf")
    split_heads(path, path.parent / "together/model-Q8_0.gguf", path.parent / "together/mtp-model-Q8_0.gguf")
    return path


@pytest.fixture(scope="module")
def path(whole: Path) -> Path:
    return whole.parent / "alone/model-Q8_0.gguf"


@pytest.fixture(scope="module")
def drafting(path: Path, whole: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=whole.parent / "heads.gguf", **CPU) as model:
        yield model


@pytest.mark.parametrize("name", MODELS)
def test_a_separate_head_has_the_weights_of_that_in_the_file(tmp_path: Path, name: str) -> None:
    path = MODELS[name].write(tmp_path / "whole.gguf")
    parts = split_heads(path, tmp_path / "model.gguf", tmp_path / "heads.gguf")
    with GGUFFile.open(path) as whole, GGUFFile.open(parts[0]) as model, GGUFFile.open(parts[1]) as heads:
        assert is_head_file(heads)
        assert not is_head_file(whole)
        config = read_config(model)
        assert (config.draft_heads, head_count(heads, config)) == (0, read_config(whole).draft_heads)
        for index in range(head_count(heads, config)):
            expected, actual = (
                read_draft_head(file, each, read_weights(target, each), head=index)
                for file, target, each in ((whole, whole, read_config(whole)), (heads, model, config))
            )
            assert actual.spec == expected.spec
            assert (actual.own_output, actual.own_embedding) == (expected.own_output, expected.own_embedding)
            own, other = actual.weights, expected.weights
            assert [each.name for each in own.matrices()] == [each.name for each in other.matrices()]
            for each, same in zip(own.matrices(), other.matrices(), strict=True):
                np.testing.assert_array_equal(each.raw, same.raw)


def test_completions_equal_baseline_decoding(plain: Model, drafting: Model) -> None:
    assert isinstance(drafter_of(drafting), DraftHead | SeveralHeads)
    always_draft(drafting, 3)
    expected, actual = (model.generate(PROMPT, **GREEDY) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def test_the_drafts_are_those_of_a_head_in_the_file(whole: Path, drafting: Model) -> None:
    always_draft(drafting, 3)
    expected = drafting.generate(PROMPT, **GREEDY).speed.accepted_share
    with edgeinfer.load(whole, draft="mtp", **CPU) as model:
        always_draft(model, 3)
        assert model.generate(PROMPT, **GREEDY).speed.accepted_share == expected


def test_the_plan_counts_what_is_loaded_and_the_targets_matrices_once(
    whole: Path, path: Path, drafting: Model
) -> None:
    sizes = [
        sum(
            item.bytes
            for item in plan_model(model, draft=draft, **CPU).plan.items
            if item.item.startswith("draft head")
        )
        for model, draft in ((path, whole.parent / "heads.gguf"), (whole, "mtp"))
    ]
    assert sizes[0] == sizes[1] == drafter_of(drafting).nbytes


@pytest.mark.parametrize("draft", ["auto", "mtp"])
def test_a_head_next_to_the_model_is_found(whole: Path, draft: str) -> None:
    with edgeinfer.load(whole.parent / "together/model-Q8_0.gguf", draft=draft, **CPU) as model:
        assert drafter_of(model).nbytes


def test_a_file_of_a_head_is_no_model(whole: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="a draft head, wanted a model"):
        edgeinfer.load(whole.parent / "heads.gguf")
    with GGUFFile.open(whole.parent / "heads.gguf") as file:
        assert str(model_support(file)) == "nothing: it is a draft head, for --draft of its model"


def rewritten(
    source: Path, path: Path, changed: dict[str, int] | None = None, without: tuple[str, ...] = ("none",)
) -> Path:
    with GGUFFile.open(source) as file, GGUFWriter(path, {**file.metadata, **(changed or {})}) as writer:
        for name, info in file.tensors.items():
            if not name.endswith(without):
                writer.add_tensor(name, file.raw(name), info.format.name, info.shape)
    return path


@pytest.mark.parametrize(
    ("changed", "without", "message"),
    [
        ({"glm4moe.block_count": 4}, "none", "it follows layer 3, but the model has 4"),
        ({"glm4moe.embedding_length": 128}, "none", "width 128, wanted 64, that of the model"),
        ({"glm4moe.nextn_predict_layers": 2, "glm4moe.block_count": 6}, "none", "the file has 2 of them"),
        ({}, "nextn.enorm.weight", r"blk\.4\.nextn\.enorm\.weight is missing"),
        ({}, "attn_k.weight", r"blk\.4\.attn_k\.weight is missing"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, changed: dict[str, int], without: str, message: str
) -> None:
    path = MODELS["glm4moe"].write(tmp_path / "whole.gguf")
    model, heads = split_heads(path, tmp_path / "model.gguf", tmp_path / "heads.gguf")
    damaged = rewritten(heads, tmp_path / "mtp-damaged.gguf", changed, (without,))
    with pytest.raises(SettingError, match=rf"^draft: mtp-damaged\.gguf: .*{message}") as caught:
        edgeinfer.load(model, draft=damaged, **CPU)
    assert "\n" not in str(caught.value)
    with edgeinfer.load(model, **CPU) as loaded:
        assert any("mtp-damaged.gguf" in line for line in loaded.details)


def test_a_head_of_another_architecture_or_vocabulary_is_refused(tmp_path: Path) -> None:
    paths = [MODELS[name].write(tmp_path / f"{name}.gguf") for name in ("glm4moe", "qwen35")]
    _, heads = split_heads(paths[0], tmp_path / "model.gguf", tmp_path / "heads.gguf")
    with pytest.raises(SettingError, match="architecture glm4moe, wanted qwen35, that of the model"):
        edgeinfer.load(paths[1], draft=heads, **CPU)
    with GGUFFile.open(heads) as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
    tokens[100] = "another"
    other = rewritten(heads, tmp_path / "other.gguf", {"tokenizer.ggml.tokens": tokens})  # type: ignore[dict-item]
    with edgeinfer.load(paths[0], draft=other, **CPU) as model:
        assert any("token 100 of other.gguf" in line for line in model.warnings)


def test_the_first_sibling_that_fits_is_used(tmp_path: Path) -> None:
    paths = [MODELS[name].write(tmp_path / f"{name}-whole.gguf") for name in ("glm4moe", "qwen35")]
    folder = tmp_path / "models"
    folder.mkdir()
    for path, name in zip(paths, ("glm4moe", "qwen35"), strict=True):
        split_heads(path, folder / f"{name}-Q4_K_M.gguf", folder / f"mtp-{name}-Q8_0.gguf")
    (folder / "mtp-broken-Q4_K_M.gguf").write_bytes(b"GGUF")
    for name in ("glm4moe", "qwen35"):
        path = folder / f"{name}-Q4_K_M.gguf"
        with GGUFFile.open(path) as file:
            target = DraftTarget.of(ModelFile(name, path, "path"), file, read_config(file))
            draft, warnings = open_draft("auto", target)
            assert draft is not None
            assert (draft.name, warnings) == (f"mtp-{name}-Q8_0", ())
            draft.close()
