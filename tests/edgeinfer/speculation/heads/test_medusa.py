"""Medusa heads in the published layout: drafts change the speed of a completion and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.model_config.support import support_of
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.medusa_heads import MedusaHeads
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel

safetensors = pytest.importorskip("safetensors.numpy")
PROMPT = "Once upon a time, there was a little fox."
TARGET = RandomModel("llama", layers=2, context=256)
HEADS, WIDTH = 3, 64
Floats = npt.NDArray[np.float32]


def weights(heads: int = HEADS) -> dict[str, Floats]:
    """The tensors of random heads, by their published names."""
    random, tensors = np.random.default_rng(4), dict[str, Floats]()
    for head in range(heads):
        for name, shape, deviation in (
            ("0.linear.weight", (WIDTH, WIDTH), 1 / 8),
            ("0.linear.bias", (WIDTH,), 1 / 4),
            ("1.weight", (VOCABULARY, WIDTH), 1 / 4),
        ):
            tensors[f"{head}.{name}"] = random.normal(0, deviation, shape).astype(np.float32)
    return tensors


def folder_of(path: Path, tensors: dict[str, Floats], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    given = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "x", **config}
    (path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    safetensors.save_file(tensors, path / "medusa_lm_head.safetensors")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("medusa") / "heads", weights())


@pytest.fixture(scope="module")
def heads(folder: Path) -> Path:
    target = folder.parent / "heads.gguf"
    edgeinfer.convert(folder, target)
    return target


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGET.write(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module")
def drafting(path: Path, heads: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=heads, draft_tree_width=2, **CPU) as model:
        assert isinstance(drafter_of(model), MedusaHeads)
        yield model


@pytest.mark.parametrize("settings", [{}, {"repeat_penalty": 1.3}, {"temperature": 0.9, "seed": 3}])
@pytest.mark.parametrize("nodes", [4, 12])
def test_completions_equal_baseline_decoding(
    plain: Model, drafting: Model, settings: dict[str, Any], nodes: int
) -> None:
    always_tree(drafting, 4, nodes)
    expected, actual = (model.generate(PROMPT, **{**GREEDY, **settings}) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def test_each_head_has_the_logits_of_the_formula(plain: Model, drafting: Model) -> None:
    ids = drafting.tokenizer.encode(PROMPT)
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:-1])
    draft = drafter_of(drafting).propose(ids, DraftRequest(7, SamplingParams(temperature=0.0)))
    plain.engine.rewind(0)
    state, given = plain.engine.rows(ids[:-1])[-1], weights()
    assert len(draft.ids) == HEADS
    for head, (token, prob) in enumerate(zip(draft.ids, draft.probs, strict=True)):
        inner = given[f"{head}.0.linear.weight"] @ state + given[f"{head}.0.linear.bias"]
        logits = given[f"{head}.1.weight"] @ (state + inner / (1 + np.exp(-inner)))
        assert token == int(logits.argmax())
        assert prob == pytest.approx(1 / np.exp(logits - logits.max()).sum(), rel=1e-3)


def test_a_tree_has_candidates_of_each_head(drafting: Model) -> None:
    ids = drafting.tokenizer.encode(PROMPT)
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:-1])
    draft = drafter_of(drafting).propose(ids, DraftRequest(7, SamplingParams(temperature=0.0), max_nodes=15))
    assert draft.depth <= HEADS
    first, *others = [node for node in range(len(draft.ids)) if draft.children(node)]
    for other in others:
        if draft.parents[other] == draft.parents[first]:
            assert [draft.ids[each] for each in draft.children(other)][:1] == [
                draft.ids[each] for each in draft.children(first)
            ][:1]


def test_a_folder_is_a_draft_by_its_path(path: Path, folder: Path, plain: Model) -> None:
    with edgeinfer.load(path, draft=folder, **CPU) as model:
        always_draft(model, 3)
        assert model.generate(PROMPT, **GREEDY).ids == plain.generate(PROMPT, **GREEDY).ids
        assert isinstance(drafter_of(model), MedusaHeads)


def test_quantized_heads_draft_almost_the_same(path: Path, folder: Path, plain: Model) -> None:
    target = folder.parent / "q8.gguf"
    edgeinfer.convert(folder, target, "Q8_0")
    with edgeinfer.load(path, draft=target, **CPU) as model:
        always_draft(model, 3)
        assert model.generate(PROMPT, **GREEDY).ids == plain.generate(PROMPT, **GREEDY).ids


def test_trees_of_a_recurrent_target_change_no_completion(heads: Path, tmp_path: Path) -> None:
    target = ZOO["qwen35"].write(tmp_path / "qwen35.gguf")
    with edgeinfer.load(target, draft=None, **CPU) as model:
        expected = model.generate(PROMPT, **GREEDY).ids
    with edgeinfer.load(target, draft=heads, draft_tree_width=2, **CPU) as model:
        always_tree(model, 3, 9)
        assert model.generate(PROMPT, **GREEDY).ids == expected


def test_the_heads_are_in_the_plan_with_the_bytes_that_they_take(
    path: Path, heads: Path, drafting: Model
) -> None:
    assert drafting.plan is not None
    loaded = {(item.item, item.device): item.bytes for item in drafting.plan.items}
    planned = plan_model(path, draft=heads, **CPU).plan
    assert {(item.item, item.device): item.bytes for item in planned.items} == loaded
    assert loaded["draft head", "cpu"] == drafter_of(drafting).nbytes
    beside = plan_model(path, draft=heads, device="rtx 4090, 64 GiB", context=256)
    assert beside.plan.draft == "gpu"


def test_the_heads_are_no_model(heads: Path) -> None:
    assert str(support_of(heads)) == "nothing: it is a draft head, for --draft of its model"
    with pytest.raises(EdgeInferError, match="a draft head, wanted a model"):
        edgeinfer.load(heads, device="cpu")


@pytest.mark.parametrize(
    ("changed", "config", "message"),
    [
        ({}, {"medusa_num_layers": 2}, "medusa_num_layers: saw 2, wanted 1"),
        ({}, {"medusa_num_heads": 0}, "medusa_num_heads: saw 0, wanted 1 to 16"),
        ({}, {"medusa_num_heads": 4}, "tensor 3.0.linear.bias is missing"),
        ({"3.1.weight": np.zeros((4, 4), np.float32)}, {}, "tensor 3.1.weight belongs to none of the heads"),
        ({"0.1.weight": np.zeros(4, np.float32)}, {}, r"tensor 0.1.weight: F32 of shape \(4,\), wanted"),
        ({"0.1.weight": np.zeros((300, 64), np.float32)}, {}, "vocabulary_size: 300, wanted 288"),
        ({"0.1.weight": np.zeros((288, 32), np.float32)}, {}, "embedding_length: 32, wanted 64"),
    ],
)
def test_wrong_heads_are_refused_in_one_line(
    path: Path, tmp_path: Path, changed: dict[str, Floats], config: dict[str, Any], message: str
) -> None:
    wrong = folder_of(tmp_path / "wrong", {**weights(), **changed}, **config)
    with pytest.raises((SettingError, EdgeInferError), match=message) as caught:
        edgeinfer.load(path, draft=wrong, **CPU)
    assert "\n" not in str(caught.value)
