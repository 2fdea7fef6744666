"""Requests that share their steps have drafts, too: each gives what it gives alone without any."""

from collections.abc import Sequence
from typing import Any

import pytest

from edgeinfer.errors import SettingError
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import ChainedDrafter, Draft, Drafter, DraftRequest
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.backend import PAGE
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.generation.batching.live_engines import CONTEXT, Run, alone, engine_of, prompt, request
from tests.edgeinfer.generation.batching.test_scheduler import assert_no_page_is_lost, requests_of_each_kind
from tests.edgeinfer.speculation.test_drafting import draft_always
from tests.kernels.cpu.test_cpu_backend import cpu, exact
from tests.random_models import VOCABULARY


class Oracle(Drafter):
    """Knows the completion of each prompt, but every `wrong`-th token is another one."""

    name = "oracle"

    def __init__(self, texts: Sequence[Sequence[int]], wrong: int = 5) -> None:
        self._texts, self._wrong = [list(text) for text in texts], wrong

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        held = list(history)
        text = next((text for text in self._texts if text[: len(held)] == held), held)
        ids = text[len(held) : len(held) + request.max_tokens]
        places = range(len(held), len(held) + len(ids))
        return Draft(
            tuple(
                (token + 1) % VOCABULARY if at % self._wrong == 0 else token
                for at, token in zip(places, ids, strict=True)
            )
        )


def drafted_run(zoo_file: ZooFile, build: Any, drafter: Drafter, length: int, positions: int) -> Run:
    engine = engine_of(zoo_file("llama"), build, positions)
    speculator = Speculator(engine, drafter)
    for controller in speculator.controllers.values():
        draft_always(controller, length)
    return Run(engine, speculator)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("build", [exact, cpu()], ids=["reference", "cpu"])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_requests_with_drafts_give_the_ids_of_each_alone(zoo_file: ZooFile, build: Any, length: int) -> None:
    requests = requests_of_each_kind()
    expected = alone(zoo_file("llama"), requests, build)
    texts = [[*each.prompt_ids, *ids] for each, ids in zip(requests, expected, strict=True)]
    run = drafted_run(zoo_file, build, Oracle(texts), length, 4 * CONTEXT)
    assert run.finish({0: requests[:2], 5: requests[2:]}) == expected
    assert [token.logprob is not None for token in run.tokens[2]] == [True] * 25
    assert all(live.drafts.drafted > live.drafts.accepted > 0 for live in run.live)
    speed = run.live[0].generation(run.tokens[0]).speed
    assert speed.accepted_share is not None
    assert 0 < speed.accepted_share < 1
    assert isinstance(run.scheduler.requests, PagedRequests)
    assert_no_page_is_lost(run.scheduler.requests)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("positions", [4 * CONTEXT, CONTEXT], ids=["room for all", "room for one"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_draft_model_drafts_for_all_requests(zoo_file: ZooFile, positions: int, chained: bool) -> None:
    """The same model drafts: what isn't cut short is accepted, and each text is read once, in chunks."""
    requests = [request(prompt(length, length), 20) for length in (60, 90, 100)]
    engine = engine_of(zoo_file("llama"), cpu(), positions)
    model = DraftModel(engine, VOCABULARY, 0)
    drafter = ChainedDrafter([PromptLookup(), model]) if chained else model
    run = drafted_run(zoo_file, cpu(), drafter, 3, 4 * CONTEXT)
    assert run.finish({0: requests}) == alone(zoo_file("llama"), requests, cpu())
    drafted = sum(live.drafts.drafted for live in run.live)
    assert drafted > (20 if positions > CONTEXT else 8)
    assert sum(live.drafts.accepted for live in run.live) > 0.8 * drafted


def test_a_request_that_is_alone_again_continues_with_its_draft_model(zoo_file: ZooFile) -> None:
    requests = [request(prompt(20), 50), request(prompt(20, 1), 8)]
    engine = engine_of(zoo_file("llama"), cpu(), 2 * CONTEXT)
    run = drafted_run(zoo_file, cpu(), DraftModel(engine, VOCABULARY, 0), 3, 4 * CONTEXT)
    assert run.finish({2: [requests[0]], 6: [requests[1]]}) == alone(zoo_file("llama"), requests, cpu())
    first = run.live[0].sequence.ids
    assert engine.ids == first[: len(engine.ids)]
    assert len(engine.ids) > len(first) - 8


@pytest.mark.slow
def test_prompt_lookup_has_an_index_for_each_request(zoo_file: ZooFile) -> None:
    requests = [request(3 * prompt(12, seed), 40) for seed in range(3)]
    run = drafted_run(zoo_file, exact, PromptLookup(), 4, 4 * CONTEXT)
    assert run.finish({0: requests}) == alone(zoo_file("llama"), requests)
    assert all(live.drafts.drafted > 0 for live in run.live)
    assert any(live.drafts.accepted > 0 for live in run.live)


def test_a_stop_text_ends_a_request_within_its_draft(zoo_file: ZooFile) -> None:
    """What was accepted after it isn't in the prefix tree."""
    plain = [request(prompt(40), 25), request(prompt(30, 1), 25)]
    path = zoo_file("llama")
    run = Run(engine_of(path, positions=4 * CONTEXT))
    run.finish({0: plain})
    texts = [
        [*each.prompt_ids, *live.sequence.ids[len(each.prompt_ids) :]]
        for each, live in zip(plain, run.live, strict=True)
    ]
    stop = run.tokens[0][9].text
    stopped = [request(prompt(40), 25, stop=(stop,)), plain[1]]
    expected = alone(path, stopped)
    drafted = drafted_run(zoo_file, exact, Oracle(texts, 1000), 7, 4 * CONTEXT)
    assert drafted.finish({0: stopped}) == expected
    assert isinstance(drafted.scheduler.requests, PagedRequests)
    assert_no_page_is_lost(drafted.scheduler.requests)
    continued = [request([*prompt(40), *expected[0], 7, 8], 5)]
    assert drafted.finish({0: continued})[-1:] == alone(path, continued)


def test_drafts_take_no_pages_of_other_requests(zoo_file: ZooFile) -> None:
    """Two requests fill the cache to the last page."""
    requests = [request(prompt(2 * PAGE, seed), 30) for seed in range(2)]
    expected = alone(zoo_file("llama"), requests)
    texts = [[*each.prompt_ids, *ids] for each, ids in zip(requests, expected, strict=True)]
    run = drafted_run(zoo_file, exact, Oracle(texts, 1000), 7, 8 * PAGE)
    assert run.finish({0: requests}) == expected
    assert [live.turn for live in run.live] == [1, 2]


@pytest.mark.slow
def test_a_context_shift_and_a_full_context_end_drafts_in_time(zoo_file: ZooFile) -> None:
    requests = [request(prompt(CONTEXT - 20, seed), 19) for seed in range(2)]
    shifting = request(prompt(CONTEXT - 20, 5), 60, context_shift=ContextShift(4, CONTEXT))
    expected = alone(zoo_file("llama"), [*requests, shifting])
    texts = [[*each.prompt_ids, *ids] for each, ids in zip(requests, expected, strict=False)]
    run = drafted_run(zoo_file, exact, Oracle(texts, 1000), 7, 4 * CONTEXT)
    ids = run.finish({0: [*requests, shifting]})
    assert ids[:2] == expected[:2]
    assert len(ids[2]) == 60
    assert run.live[2].sequence.shifts > 0


def test_a_drafter_that_makes_too_few_drafts_is_named(zoo_file: ZooFile) -> None:
    class Lazy(Oracle):
        def propose_each(self, texts: Any) -> list[Draft]:
            return []

    run = drafted_run(zoo_file, exact, Lazy([]), 3, 4 * CONTEXT)
    run.finish({0: [request(prompt(9, seed), 5) for seed in range(2)]})
    assert isinstance(run.live[0].error, SettingError)
    assert str(run.live[0].error) == "draft: oracle made 0 drafts for 1 texts"
    assert run.live[1].error is None
