"""Gemma 4 assistants on a GPU: drafts are those of the formula, and completions those without drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.device_assistant import DeviceAssistant
from edgeinfer.speculation.prompt_lookup import PromptLookup
from tests.edgeinfer.speculation.heads.random_assistant import assistant_logits, random_assistant
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.kernels.cuda.draft.test_head_loading import GPU, GREEDY, IDS, drafter_of
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.draft.test_split_heads import Splitting
from tests.kernels.cuda.draft.test_split_heads import split as split
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.model_zoo import ZOO
from tests.random_gemma import gemma4_parts
from tests.random_models import VOCABULARY, RandomModel

PATTERNS = {"gemma4": "wwg", "gemma4-per-layer": "gw"}
DRAFTED = 4


def files(name: str, folder: Path, formats: tuple[str, ...] = ("F16",)) -> tuple[Path, Path]:
    """A target and an assistant."""
    target = replace(ZOO[name], formats=formats).write(folder / "model.gguf")
    assistant = replace(random_assistant(PATTERNS[name]), formats=formats)
    return target, assistant.write(folder / "assistant.gguf")


def draft_after(model: Model, count: int) -> tuple[list[int], Draft]:
    """A text of `count` tokens, and a draft after it."""
    ids = [int(token) for token in np.random.default_rng(count).integers(3, VOCABULARY, count)]
    model.engine.rewind(0)
    model.engine.append(ids[:-1])
    draft: Draft = drafter_of(model).propose(ids, DraftRequest(DRAFTED, SamplingParams(temperature=0.0)))
    assert len(draft.ids) == DRAFTED
    return ids, draft


def check_draft(path: Path, assistant: Path, model: Model, count: int, rounding: float = 0.05) -> None:
    """Check the ids and probabilities of a draft against the formula."""
    ids, draft = draft_after(model, count)
    logits = assistant_logits(path, assistant, ids, draft.ids[:-1])
    for token, prob, row in zip(draft.ids, draft.probs, logits, strict=True):
        assert row[token] >= row.max() - rounding * np.abs(row).max()
        assert prob == pytest.approx(np.exp(row[token]) / np.exp(row).sum(), rel=rounding)


def check_completion(model: Model) -> None:
    """It is that without drafts, and the plan counts the bytes of the assistant."""
    drafter = drafter_of(model)
    assert isinstance(drafter, DeviceAssistant), model.warnings
    assert model.plan is not None
    planned = {(item.item, item.device): item.bytes for item in model.plan.items}
    assert planned["draft head", "gpu"] == drafter.nbytes
    speculator, model.speculator = model.speculator, None
    model.engine.rewind(0)
    expected = model.generate(IDS, **GREEDY).ids
    model.speculator = speculator
    always_draft(model, 3)
    for ids in (IDS, [*IDS, *expected[:2]]):
        completion = model.generate(ids, **GREEDY)
        assert completion.ids[: len(expected) - 2] == expected[len(ids) - len(IDS) :][: len(expected) - 2]
        assert completion.speed.accepted_share is not None


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["gemma4", pytest.param("gemma4-per-layer", marks=pytest.mark.every_case)])
def test_drafts_are_those_of_the_formula_and_completions_those_without(tmp_path: Path, name: str) -> None:
    path, assistant = files(name, tmp_path)
    with edgeinfer.load(path, draft=assistant, **GPU) as model:
        for count in (2, 9, 60):
            check_draft(path, assistant, model, count)
        check_completion(model)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("settings", [{"kv": "q8_0"}, {"kv": "q4_0+f16"}, {"parallel": 2}])
def test_an_assistant_reads_other_caches(tmp_path: Path, settings: dict[str, Any]) -> None:
    path, assistant = files("gemma4", tmp_path)
    options = {**GPU, **settings}
    with edgeinfer.load(path, draft=assistant, **{**options, "device": "cpu"}) as plain:
        expected = [draft_after(plain, count)[1] for count in (9, 60)]
    with edgeinfer.load(path, draft=assistant, **options) as model:
        assert isinstance(drafter_of(model), DeviceAssistant), model.warnings
        for count, wanted in zip((9, 60), expected, strict=True):
            _, found = draft_after(model, count)
            assert found.ids == wanted.ids
            assert found.probs == pytest.approx(wanted.probs, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.every_case)])
def test_an_assistant_of_a_split_model_is_on_the_gpu(tmp_path: Path, split: Splitting, tied: bool) -> None:
    parts = gemma4_parts("wwgwgwwgwgwwgwg")
    sizes: dict[str, Any] = {"head_dim": 32, "tied": tied, "feed_forward": 512, "formats": ("F16",)}
    path = RandomModel("gemma4", layers=15, **parts, **sizes).write(tmp_path / "model.gguf")
    assistant = replace(random_assistant("wwg"), formats=("F16",)).write(tmp_path / "assistant.gguf")
    with split(path, assistant, missing=0.1) as model:
        assert model.plan is not None
        assert len(model.plan.devices) == 2
        check_completion(model)
        check_draft(path, assistant, model, 60, 0.15)


@pytest.mark.slow
def test_without_memory_for_all_attention_prompt_lookup_is_used(tmp_path: Path, split: Splitting) -> None:
    path, assistant = files("gemma4", tmp_path)
    with split(path, assistant, missing=0.9) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert any("hidden states or caches the head reads" in line for line in model.warnings)


def test_a_described_gpu_has_the_assistant(tmp_path: Path) -> None:
    path, assistant = files("gemma4", tmp_path)
    planned = plan_model(path, draft=assistant, device="rtx 4090, 64 GiB", context=256).plan
    assert planned.draft == "gpu"
