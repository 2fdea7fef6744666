"""Gemma 4 assistants: drafters that read the KV caches of their target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError, UnsupportedModelError
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.assistant import Assistant
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of
from tests.edgeinfer.speculation.heads.random_assistant import assistant_logits, random_assistant
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.random_models import VOCABULARY

PROMPT = "Once upon a time, there was a little fox."


@pytest.fixture(scope="module", params=["gemma4", "gemma4-per-layer"])
def path(request: pytest.FixtureRequest, zoo_file: ZooFile) -> Path:
    return zoo_file(request.param)


@pytest.fixture(scope="module")
def assistant(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pattern = "wwg" if path.stem == "gemma4" else "gw"
    return random_assistant(pattern).write(tmp_path_factory.mktemp("assistant") / "assistant.gguf")


@pytest.fixture(scope="module")
def drafting(path: Path, assistant: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=assistant, **CPU) as model:
        assert isinstance(drafter_of(model), Assistant)
        yield model


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_completions_equal_baseline_decoding(plain: Model, drafting: Model, settings: dict[str, Any]) -> None:
    always_draft(drafting, 4)
    for prompt in (PROMPT, PROMPT * 4, PROMPT + " It had"):
        expected, actual = (model.generate(prompt, **{**GREEDY, **settings}) for model in (plain, drafting))
        assert actual.ids == expected.ids
        assert actual.speed.accepted_share is not None


def check_draft(path: Path, assistant: Path, model: Model, count: int) -> None:
    """Check a draft after a text of `count` tokens against the formula."""
    ids = [int(token) for token in np.random.default_rng(count).integers(3, VOCABULARY, count)]
    model.engine.rewind(0)
    model.engine.append(ids[:-1])
    draft = drafter_of(model).propose(ids, DraftRequest(5, SamplingParams(temperature=0.0)))
    assert len(draft.ids) == 5
    logits = assistant_logits(path, assistant, ids, draft.ids[:-1])
    for token, row in zip(draft.ids, logits, strict=True):
        assert row[token] >= row.max() - 0.02 * np.abs(row).max()


@pytest.mark.parametrize("count", [2, 9, 60])
def test_draft_tokens_are_those_of_the_formula(
    path: Path, assistant: Path, drafting: Model, count: int
) -> None:
    check_draft(path, assistant, drafting, count)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("settings", [{"kv": "q8_0"}, {"kv": "q4_0+f16"}, {"parallel": 2}])
def test_an_assistant_reads_other_caches(path: Path, assistant: Path, settings: dict[str, Any]) -> None:
    with edgeinfer.load(path, draft=assistant, **settings, **CPU) as model:
        check_draft(path, assistant, model, 20)


def test_the_assistant_is_in_the_plan_with_the_bytes_that_it_takes(
    path: Path, assistant: Path, drafting: Model
) -> None:
    assert drafting.plan is not None
    planned = plan_model(path, draft=assistant, **CPU).plan
    bytes_of = {(item.item, item.device): item.bytes for item in planned.items}
    assert bytes_of == {(item.item, item.device): item.bytes for item in drafting.plan.items}
    found = [size for (item, _), size in bytes_of.items() if "draft" in item]
    assert found == [drafter_of(drafting).nbytes]


@pytest.mark.parametrize(
    ("target", "settings", "line"),
    [
        ("gemma3", {}, "a Gemma 4 assistant, but the model is gemma3"),
        ("gemma4", {"target_width": 32}, "embedding_length_out: 32, wanted 64"),
        ("gemma4", {"kv_heads": 4}, "4 key heads of 16, wanted 2 of 16"),
        ("gemma4-moe", {}, "layer 1 of the model has no window, wanted one"),
    ],
)
def test_an_assistant_of_another_model_is_refused_in_one_line(
    zoo_file: ZooFile, tmp_path: Path, target: str, settings: dict[str, Any], line: str
) -> None:
    other = random_assistant(**settings).write(tmp_path / "other.gguf")
    with pytest.raises(SettingError, match=line) as caught:
        edgeinfer.load(zoo_file(target), draft=other, **CPU)
    assert "\n" not in str(caught.value)


def test_an_assistant_is_no_model(assistant: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="a draft head, wanted a model"):
        edgeinfer.load(assistant, draft=None, **CPU)
