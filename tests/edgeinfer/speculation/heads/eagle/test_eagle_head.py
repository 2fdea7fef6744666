"""EAGLE-3 heads: drafts change the speed of a completion and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError, UnsupportedModelError
from edgeinfer.model_config.support import support_of
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.draft_head import DraftHead
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of, sampled_drafts
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

PROMPT = "Once upon a time, there was a little fox."
HEAD = RandomEagle(format="Q8_0", own_table=True)
TARGETS = {
    "llama": RandomModel("llama", layers=4, context=256, formats=("Q8_0",)),
    "qwen35": replace(ZOO["qwen35-draft-head"], draft_head=False),
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return HEAD.write(tmp_path_factory.mktemp("head") / "head.gguf")


@pytest.fixture(scope="module", params=TARGETS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGETS[request.param].write(tmp_path_factory.mktemp("target") / f"{request.param}.gguf")


@pytest.fixture(scope="module")
def drafting(path: Path, head: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=head, **CPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        yield model


@pytest.mark.parametrize("settings", [{}, {"repeat_penalty": 1.3}, {"temperature": 0.9, "seed": 3}])
def test_completions_equal_baseline_decoding(plain: Model, drafting: Model, settings: dict[str, Any]) -> None:
    always_draft(drafting, 4)
    expected, actual = (model.generate(PROMPT, **{**GREEDY, **settings}) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


@pytest.fixture(scope="module")
def growing(path: Path, head: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=head, draft_tree_width=2, **CPU) as model:
        yield model


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_completions_with_trees_equal_baseline_decoding(
    plain: Model, growing: Model, settings: dict[str, Any]
) -> None:
    always_tree(growing, 4, 12)
    expected, actual = (model.generate(PROMPT, **{**GREEDY, **settings}) for model in (plain, growing))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def test_the_states_of_an_accepted_path_reach_the_head(plain: Model, growing: Model) -> None:
    """They are those of the same text without trees."""
    always_tree(growing, 4, 12)
    completion, seen = growing.generate(PROMPT, **GREEDY), dict[int, Any]()
    drafter = drafter_of(growing)
    observe = drafter.observe

    def watch(step: Any) -> None:
        for index in range(len(step.ids)):
            seen[step.start + index] = [each[index].copy() for each in step.states]
        observe(step)

    ids = [*completion.prompt_ids, *completion.ids]
    growing.engine.hand_out(drafter.hidden_layers, watch)
    growing.engine.rewind(0)
    growing.generate(PROMPT, **GREEDY)
    plain_states = dict[int, Any]()

    def note(step: Any) -> None:
        for index in range(len(step.ids)):
            plain_states[step.start + index] = [each[index].copy() for each in step.states]

    growing.engine.hand_out(drafter.hidden_layers, note)
    growing.engine.rewind(0)
    growing.engine.append_all(ids[:-1])
    growing.engine.hand_out(drafter.hidden_layers, drafter.observe)
    observed = [position for position in seen if position < len(ids) - 1]
    assert len(observed) >= len(completion.ids) - 1
    for position in observed:
        for actual, expected in zip(seen[position], plain_states[position], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_a_prompt_of_several_chunks_and_a_full_context(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    ids = plain.tokenizer.encode(PROMPT * 9)[:240]
    expected, actual = (model.generate(ids, temperature=0.0) for model in (plain, drafting))
    assert actual.ids == expected.ids


def test_the_draft_loop_drafts_ids_of_the_head_as_drafting_one_by_one(drafting: Model) -> None:
    drafter, known = drafter_of(drafting), set(HEAD.ids().tolist())
    ids = drafting.tokenizer.encode(PROMPT)
    request = DraftRequest(5, SamplingParams(temperature=0.0))
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:-1])
    native = drafter.propose(ids, request)
    drafter.max_prompt, count = 0, drafter.max_prompt
    single = drafter.propose(ids, request)
    drafter.max_prompt = count
    assert count
    assert len(native.ids) == 5
    assert set(native.ids) <= known
    assert native.ids == single.ids
    assert native.probs == pytest.approx(single.probs, rel=1e-4)


def test_sampled_drafts_have_the_distribution_that_they_were_sampled_from(drafting: Model) -> None:
    ids, known = drafting.tokenizer.encode(PROMPT), set(HEAD.ids().tolist())
    for draft in sampled_drafts(drafting, ids):
        assert draft.distributions is not None
        for candidates, _ in draft.distributions:
            assert set(candidates.tolist()) <= known
            assert (np.diff(candidates) > 0).all()


def test_the_head_is_in_the_plan_with_the_bytes_that_it_takes(
    path: Path, head: Path, drafting: Model
) -> None:
    assert drafting.plan is not None
    loaded = {(item.item, item.device): item.bytes for item in drafting.plan.items}
    planned = plan_model(path, draft=head, **CPU).plan
    assert {(item.item, item.device): item.bytes for item in planned.items} == loaded
    assert loaded["draft head", "cpu"] == drafter_of(drafting).nbytes


def test_a_head_is_no_model(head: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="a draft head, wanted a model"):
        edgeinfer.load(head, device="cpu")
    assert str(support_of(head)) == "nothing: it is a draft head, for --draft of its model"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (RandomEagle(target_layers=(0, 1, 9)), r"target_layers: \[0, 1, 9\], wanted three numbers"),
        (RandomEagle(target_layers=(1, 2)), r"target_layers: \[1, 2\], wanted three numbers"),
        (RandomEagle(target_width=32), "target_hidden_size: 32, wanted 64, that of the model"),
        (RandomEagle(width=32, rows=0), "width 32 and no token_embd.weight, wanted 64"),
        (RandomEagle(extra={"block_count": 2}), "block_count: 2, wanted 1"),
        (RandomEagle(rows=2, given_ids=(5, 288)), "d2t: id 288, wanted 0 to 287, the ids of the model"),
        (RandomEagle(rows=2, given_ids=(-1, 5)), "d2t: id -1, wanted 0 to 287"),
        (RandomEagle(rows=2, given_ids=(5, 5)), "d2t: an id occurs twice"),
        (RandomEagle(extra={"norm_before_fc": 3}), "norm_before_fc: 3, wanted true or false"),
    ],
)
def test_a_head_of_another_model_is_refused_in_one_line(
    tmp_path: Path, wrong: RandomEagle, message: str
) -> None:
    path = TARGETS["llama"].write(tmp_path / "target.gguf")
    with pytest.raises(SettingError, match=message) as caught:
        edgeinfer.load(path, draft=wrong.write(tmp_path / "wrong.gguf"), **CPU)
    assert "\n" not in str(caught.value)
