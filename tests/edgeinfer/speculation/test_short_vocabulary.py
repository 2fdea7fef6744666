"""Draft heads that draft from the first rows of their output: completions stay the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.registry.registry import find_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation import draft_vocabulary
from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.drafter import ChainedDrafter, Draft, DraftRequest
from edgeinfer.speculation.heads.several_heads import SeveralHeads
from edgeinfer.speculation.speculator import Speculator
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of
from tests.edgeinfer.speculation.heads.head_files import with_output
from tests.edgeinfer.speculation.heads.random_heads import HEADS_OF
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.model_zoo import ZOO

STORY = "Once upon a time, there was a little girl named Lily."
SHORT = 2048
"""Of the 8,192 ids of the built-in model."""


def small_vocabularies(patch: pytest.MonkeyPatch, groups: int = 1024) -> None:
    """Small vocabularies have short ones too, of a number of these groups."""
    for name, value in (("MIN_VOCABULARY", 1), ("MIN_SHORT", 1), ("DRAFT_ROWS", groups)):
        patch.setattr(draft_vocabulary, name, value)


def always_short(model: Model, *, is_short: bool = True) -> None:
    """Drafts of the short vocabulary, or of all rows, whatever their cost."""
    assert model.speculator is not None

    def of(controller: DraftController) -> Any:
        return lambda coverage: setattr(controller.costs, "is_short", is_short)

    for controller in model.speculator.controllers.values():
        setattr(controller, "choose_vocabulary", of(controller))  # noqa: B010


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in head, which drafts all ids with the model's output."""
    source = find_model("tiny").head_path
    assert source is not None
    return with_output(source, tmp_path_factory.mktemp("head") / "head.gguf", None, None)


@pytest.fixture(scope="module")
def shorter(head: Path) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        small_vocabularies(patch)
        with edgeinfer.load("tiny", draft=head, draft_tree_width=3, **CPU) as model:
            assert drafter_of(model).short_vocabulary == SHORT
            yield model


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with edgeinfer.load("tiny", draft=None, **CPU) as model:
        yield model


def drafts_of(model: Model, vocabulary: int, count: int = 1, nodes: int = 0, **params: Any) -> list[Draft]:
    """Drafts after a text, of a vocabulary."""
    ids = model.tokenizer.encode(STORY)
    model.engine.rewind(0)
    model.engine.append(ids[:-1])
    request = DraftRequest(5, SamplingParams(**params), max_nodes=nodes, vocabulary=vocabulary)
    return [drafter_of(model).propose(ids, request) for _ in range(count)]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("settings", [{}, {"repeat_penalty": 1.2}, {"temperature": 0.9, "seed": 3}])
@pytest.mark.parametrize("trees", [False, True])
def test_completions_equal_baseline_decoding(
    plain: Model, shorter: Model, settings: dict[str, Any], trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_tree(shorter, 4, 9)
    if not trees:
        monkeypatch.setattr(drafter_of(shorter), "tree_width", 1)
    for is_short in (True, False, True):
        always_short(shorter, is_short=is_short)
        expected, actual = (model.generate(STORY, **{**GREEDY, **settings}) for model in (plain, shorter))
        assert actual.ids == expected.ids
        assert actual.speed.accepted_share


@pytest.mark.parametrize("nodes", [0, 15])
def test_a_draft_has_the_most_probable_tokens_of_the_short_vocabulary(shorter: Model, nodes: int) -> None:
    for size in (SHORT, 16):
        (draft,) = drafts_of(shorter, size, nodes=nodes, temperature=0.0)
        assert draft.depth >= 4
        assert max(draft.ids) < size
    (whole,) = drafts_of(shorter, 0, temperature=0.0)
    (short,) = drafts_of(shorter, SHORT, temperature=0.0)
    same = next((n for n, token in enumerate(whole.ids) if token >= SHORT), len(whole.ids))
    assert short.ids[:same] == whole.ids[:same]
    assert all(own >= prob for own, prob in zip(short.probs[:same], whole.probs, strict=False))


def test_drafts_one_by_one_equal_those_of_the_draft_loop(shorter: Model) -> None:
    drafter = drafter_of(shorter)
    (native,) = drafts_of(shorter, 48, temperature=0.0)
    drafter.max_prompt, count = 0, drafter.max_prompt
    (single,) = drafts_of(shorter, 48, temperature=0.0)
    drafter.max_prompt = count
    assert native.ids == single.ids
    assert native.probs == pytest.approx(single.probs, rel=1e-4)


@pytest.mark.parametrize("loop", [True, False])
def test_sampled_drafts_have_a_distribution_over_the_short_vocabulary(shorter: Model, loop: bool) -> None:
    drafter = drafter_of(shorter)
    count = drafter.max_prompt
    drafter.max_prompt = count if loop else 0
    drafts = drafts_of(shorter, 64, 20, temperature=1.5)
    drafter.max_prompt = count
    assert len({draft.ids for draft in drafts}) > 1
    for draft in drafts:
        assert draft.distributions is not None
        for token, (ids, probs) in zip(draft.ids, draft.distributions, strict=True):
            assert token in ids
            assert ids.max() < 64
            assert probs.sum() == pytest.approx(1.0)


@pytest.mark.slow
def test_sampled_drafts_are_as_frequent_as_their_distribution_says(shorter: Model) -> None:
    drafts = drafts_of(shorter, 48, 1500, temperature=3.0, top_k=8, top_p=1.0, min_p=0.0)
    assert drafts[0].distributions is not None
    ids, probs = drafts[0].distributions[0]
    counts = np.array([sum(draft.ids[0] == token for draft in drafts) for token in ids])
    assert counts.sum() == len(drafts)
    # Seven degrees of freedom: 40 is exceeded about once in a million runs.
    assert len(ids) == 8
    assert ((counts - probs * len(drafts)) ** 2 / (probs * len(drafts))).sum() < 40


def test_the_details_name_the_short_vocabulary(shorter: Model, plain: Model) -> None:
    lines = [line for line in shorter.details if "2,048 token ids" in line]
    assert lines == ["draft head: it drafts the first 2,048 token ids where that is faster"]
    assert not any("token ids" in line for line in plain.details)


def test_a_plan_names_the_short_vocabulary_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    small_vocabularies(monkeypatch)
    with_head, without = (plan_model("tiny", draft=draft, **CPU).warnings for draft in ("mtp", None))
    assert [line for line in with_head if "2,048 token ids" in line]
    assert not any("token ids" in line for line in without)


def test_a_plan_with_a_head_on_a_gpu_names_no_short_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    small_vocabularies(monkeypatch)
    planned = plan_model("tiny", draft="mtp", device="rtx 3090 24GiB")
    assert planned.plan.draft == "gpu"
    assert not any("token ids" in line for line in planned.warnings)


def test_until_it_is_measured_a_token_costs_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shorter: Model
) -> None:
    assert 0.5 < drafter_of(shorter).short_cost < 1
    small_vocabularies(monkeypatch, 16)
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    path = ZOO["glm4moe"].write(tmp_path / "experts.gguf")
    with edgeinfer.load(path, draft="mtp", **CPU) as model:
        assert model.speculator is not None
        assert 0.5 < drafter_of(model).short_cost < 1
        for controller in model.speculator.controllers.values():
            assert controller.costs.short == drafter_of(model).short_cost


@pytest.mark.slow
def test_drafts_of_both_sizes_are_measured(shorter: Model) -> None:
    assert shorter.speculator is not None
    costs = shorter.speculator.measure()
    assert costs.drafted_token is not None
    assert costs.short_token is not None
    assert costs.short_token >= costs.drafted_token * drafter_of(shorter).short_cost


def test_several_heads_draft_from_the_same_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_vocabularies(monkeypatch, 16)
    path = HEADS_OF["step35"](own_outputs=True).write(tmp_path / "heads.gguf")
    with edgeinfer.load(path, draft=None, **CPU) as model:
        expected = model.generate(STORY, **GREEDY).ids
    with edgeinfer.load(path, draft="mtp", **CPU) as model:
        assert isinstance(drafter_of(model), SeveralHeads)
        always_draft(model, 3)
        always_short(model)
        assert model.generate(STORY, **GREEDY).ids == expected
        (draft,) = drafts_of(model, 80, temperature=0.0)
        assert len(draft.ids) > 1
        assert max(draft.ids) < 80


def test_the_head_after_lookup_files_has_its_short_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Model, head: Path
) -> None:
    small_vocabularies(monkeypatch)
    path = tmp_path / "story.txt"
    path.write_text(STORY, encoding="utf-8")
    with edgeinfer.load("tiny", draft=head, lookup_files=path, **CPU) as model:
        assert isinstance(drafter_of(model), ChainedDrafter)
        assert drafter_of(model).short_vocabulary == SHORT
        always_draft(model, 4)
        always_short(model)
        assert model.generate(STORY, **GREEDY).ids == plain.generate(STORY, **GREEDY).ids
