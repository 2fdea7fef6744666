"""`load(draft=...)` accepts a user-defined drafter."""

from collections.abc import Sequence

import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from edgeinfer.speculation.draft_controller import DraftStats
from edgeinfer.speculation.draft_costs import MeasuredCosts
from tests.edgeinfer.speculation.test_drafting import always_draft

PROMPT = "Once upon a time, there was a little girl named Lily."


class Oracle(edgeinfer.Drafter):
    """Proposes the known continuation."""

    def __init__(self, text: Sequence[int], spoiled: bool = False) -> None:
        self.text = list(text)
        self.spoiled = spoiled
        self.requests: list[edgeinfer.DraftRequest] = []

    def propose(self, history: Sequence[int], request: edgeinfer.DraftRequest) -> edgeinfer.Draft:
        self.requests.append(request)
        ids = self.text[len(history) :][: request.max_tokens]
        return edgeinfer.Draft(tuple(token + self.spoiled for token in ids))


@pytest.fixture(scope="module")
def baseline() -> edgeinfer.Generation:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=128) as model:
        return model.generate(PROMPT, max_tokens=40, temperature=0.0)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("spoiled", [False, True])
def test_the_output_is_that_of_the_model(baseline: edgeinfer.Generation, spoiled: bool) -> None:
    drafter = Oracle([*baseline.prompt_ids, *baseline.ids], spoiled)
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=drafter, context=128) as model:
        always_draft(model, 4)
        actual = model.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert actual.ids == baseline.ids
    assert actual.speed.accepted_share == (0.0 if spoiled else 1.0)
    assert {request.params.temperature for request in drafter.requests} == {0.0}
    assert max(request.max_tokens for request in drafter.requests) >= 4


class Ending(Oracle):
    """Ends a draft itself."""

    ends_drafts = True


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", [Oracle, Ending])
def test_longer_drafts_are_requested_of_a_drafter_that_ends_them(
    baseline: edgeinfer.Generation, kind: type[Oracle]
) -> None:
    drafter = kind([*baseline.prompt_ids, *baseline.ids])
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=drafter, context=128) as model:
        assert model.speculator is not None
        controller = model.speculator.controllers["greedy"]
        controller.costs.begin(MeasuredCosts({1: 1.0, 2: 1.2, 4: 1.9, 8: 4.0}, 0.1))
        controller.begin(DraftStats(0.75, 1.0, account=8.0))
        controller.record_accepted(7, 7, [0.9] * 7)
        drafter.requests.clear()  # those that measured its costs
        model.generate(PROMPT, max_tokens=30, temperature=0.0)
    first = drafter.requests[0]
    assert (first.max_tokens == 7) if kind is Ending else (first.max_tokens < 7)
    assert 0 < first.min_prob < first.min_prob_to_continue


class Dropping(Oracle):
    """Makes four tokens, and drops all but the first."""

    def propose(self, history: Sequence[int], request: edgeinfer.DraftRequest) -> edgeinfer.Draft:
        draft = super().propose(history, request)
        return edgeinfer.Draft(draft.ids[:1], made=4)


@pytest.mark.slow
def test_a_draft_costs_what_all_of_its_tokens_cost(
    baseline: edgeinfer.Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Dropping([*baseline.prompt_ids, *baseline.ids])
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=drafter, context=128) as model:
        assert model.speculator is not None
        controller, made = model.speculator.controllers["greedy"], list[int]()
        always_draft(model, 4)

        def record_step(tokens: float, rows: int, drafted: int, draft: float, forward: float) -> None:
            made.append(drafted)

        monkeypatch.setattr(controller, "record_step", record_step)
        model.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert len(made) > 10
    assert set(made) == {4}


class InvalidTokenDrafter(Oracle):
    """Proposes a token that isn't in the vocabulary."""

    def propose(self, history: Sequence[int], request: edgeinfer.DraftRequest) -> edgeinfer.Draft:
        return edgeinfer.Draft((10**6,))


class Verbose(Oracle):
    """Proposes more than requested."""

    def propose(self, history: Sequence[int], request: edgeinfer.DraftRequest) -> edgeinfer.Draft:
        return edgeinfer.Draft((5,) * (request.max_tokens + 1))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (InvalidTokenDrafter(()), "draft: InvalidTokenDrafter proposed token id 1000000, wanted 0 to 8191"),
        (Verbose(()), "draft: Verbose proposed 4 tokens, wanted 3 at most"),
    ],
)
def test_an_invalid_draft_is_an_error(drafter: Oracle, message: str) -> None:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=drafter, context=128) as model:
        always_draft(model, 3)
        with pytest.raises(SettingError, match=message):
            model.generate(PROMPT, max_tokens=10, temperature=0.0)


def test_an_object_without_propose_is_refused() -> None:
    with pytest.raises(SettingError, match="a Drafter, or None"):
        edgeinfer.load("tiny", draft=7)  # type: ignore[call-overload]
