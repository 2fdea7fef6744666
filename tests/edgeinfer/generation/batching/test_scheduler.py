"""Live requests: each gives what it gives alone, whatever else joins, leaves, fails or waits."""

import random
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import ContextOverflowError
from edgeinfer.generation.batching.engine_requests import EngineRequests
from edgeinfer.generation.batching.joined_requests import JoinedRequests
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.generation.batching.scheduler import CHUNK_TOKENS, PAUSED_STEPS
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer_kernels.backend import PAGE
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.generation.batching.live_engines import CONTEXT, Run, alone, engine_of, prompt, request
from tests.kernels.cpu.test_cpu_backend import cpu, exact

SEEDED: dict[str, Any] = {"temperature": 1.0}
ARRIVALS = {
    "together": (0, 0, 0, 0),
    "one by one": (0, 3, 6, 9),
    "in pairs": (0, 0, 12, 12),
    "the last while one is left": (0, 1, 2, 40),
}
PLACES = {
    "paged": ("llama", 4 * CONTEXT, 0),
    "states": ("lfm2", CONTEXT, 3),
    "states and rings": ("gemma3", CONTEXT, 3),
    "few states": ("qwen35", CONTEXT, 1),
    "one state": ("lfm2", CONTEXT, 0),
}


def requests_of_each_kind() -> list[Any]:
    """Greedy, seeded, with logprobs, and one that shares a prefix with the first."""
    return [
        request(prompt(40), 25),
        request(prompt(30, 1), 25, seed=3, **SEEDED),
        request([*prompt(35), *prompt(9, 2)], 25, logprobs=2),
        request(prompt(5, 3), 25, seed=4, **SEEDED),
    ]


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("build", [exact, cpu()], ids=["reference", "cpu"])
def test_requests_together_give_the_ids_of_each_alone(
    zoo_file: ZooFile, build: Any, place: str, arrival: str
) -> None:
    model, positions, others = PLACES[place]
    requests = requests_of_each_kind()
    arrivals: dict[int, list[Any]] = {}
    for step, each in zip(ARRIVALS[arrival], requests, strict=True):
        arrivals.setdefault(step, []).append(each)
    run = Run(engine_of(zoo_file(model), build, positions, others))
    kind = PagedRequests if place == "paged" else JoinedRequests if others else EngineRequests
    assert type(run.scheduler.requests) is kind
    assert run.finish(arrivals) == alone(zoo_file(model), requests, build)
    assert [token.logprob is not None for token in run.tokens[2]] == [True] * 25
    assert [live.sequence.reason for live in run.live] == ["length"] * 4


def paged(zoo_file: ZooFile, positions: int = 4 * CONTEXT) -> tuple[Run, PagedRequests, Path]:
    path = zoo_file("llama")
    run = Run(engine_of(path, positions=positions))
    assert isinstance(run.scheduler.requests, PagedRequests)
    return run, run.scheduler.requests, path


def assert_no_page_is_lost(requests: PagedRequests) -> None:
    """After all requests have ended, each page is free, or one of an idle prefix."""
    requests.cache.store()
    assert requests.cache.free + requests.cache.idle == requests.cache.total


def test_what_was_reserved_without_a_text_is_free_for_requests(zoo_file: ZooFile) -> None:
    """The measurement of a drafter's costs reserves positions before the first request."""
    run, requests, _ = paged(zoo_file, CONTEXT)
    run.engine.cache.reserve(20)
    ids = run.finish({0: [request(prompt(20, seed), 30) for seed in range(3)]})
    assert [len(each) for each in ids] == [30] * 3
    assert_no_page_is_lost(requests)


def test_one_request_is_the_text_of_the_engine_until_another_one_arrives(zoo_file: ZooFile) -> None:
    run, requests, _ = paged(zoo_file)
    first = run.add(request(prompt(20), 30))
    for _ in range(5):
        run.step()
    assert first.is_alone
    assert run.engine.ids == first.sequence.ids[:-1]
    second = run.add(request(prompt(20, 1), 3))
    run.step()
    assert (first.is_alone, run.engine.ids) == (False, [])
    while not second.ended:
        run.step()
    run.step()
    assert first.is_alone
    assert run.engine.ids == first.sequence.ids[:-1]
    assert run.finish() == alone(zoo_file("llama"), [request(prompt(20), 30), request(prompt(20, 1), 3)])
    assert_no_page_is_lost(requests)


def test_pages_are_reused_by_later_requests_and_running_requests(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    shared = prompt(48)
    first = run.add(request([*shared, 5], 30))
    run.add(request(prompt(6, 8), 30))
    for _ in range(6):
        run.step()
    assert first.phase == "decoding"
    later = run.add(request([*shared, 9, 9], 4))
    run.finish()
    assert later.timer.cached_tokens == 48
    again = run.add(request([*shared, 9, 9], 4))
    assert run.finish()[-1] == alone(path, [request([*shared, 9, 9], 4)])[0]
    assert again.timer.cached_tokens >= 48


def test_two_alternating_chats_read_less_than_a_page_again(zoo_file: ZooFile) -> None:
    run, _, _ = paged(zoo_file)
    texts = [prompt(40), prompt(40, 1)]
    for turn in range(6):
        text = texts[turn % 2]
        live = run.add(request([*text, 7], 8))
        text[:] = [*text, 7, *run.finish()[-1]]
        if turn > 1:
            assert live.timer.cached_tokens > len(text) - 9 - 8 - PAGE


def test_requests_with_the_same_prompt_read_it_once(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    ids = prompt(45)
    requests = [request(ids, 12, seed=seed, **SEEDED) for seed in range(4)]
    together = run.finish({0: requests})
    assert together == alone(path, requests)
    assert [live.timer.cached_tokens for live in run.live] == [0, 45, 45, 45]


def test_each_step_gives_a_token_while_a_prompt_is_read(zoo_file: ZooFile) -> None:
    path = zoo_file("llama")
    run = Run(engine_of(path, positions=1024, context=512, batch=256))
    running = run.add(request(prompt(4), 60))
    for _ in range(3):
        run.step()
    reading = run.add(request(prompt(4 * CHUNK_TOKENS, 1), 3))
    counts = []
    while reading.phase != "decoding":
        before = len(running.sequence.ids)
        run.step()
        counts.append(len(running.sequence.ids) - before)
    assert counts == [1] * len(counts)
    assert len(counts) == 4


def test_a_short_prompt_does_not_wait_for_a_long_one(zoo_file: ZooFile) -> None:
    run = Run(engine_of(zoo_file("llama"), positions=1024, context=512))
    long = run.add(request(prompt(500), 3))
    run.step()
    short = run.add(request(prompt(10, 1), 3))
    run.step()
    run.step()
    assert short.phase == "decoding"
    assert long.phase == "reading"
    run.finish()


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_cancelled_request_frees_its_place_before_the_next_step(zoo_file: ZooFile, place: str) -> None:
    model, positions, others = PLACES[place]
    requests = [request(prompt(30, seed), 20) for seed in range(3)]
    run = Run(engine_of(zoo_file(model), exact, positions, others))
    live = [run.add(each) for each in requests]
    for _ in range(6):
        run.step()
    live[0].cancelled = True
    run.step()
    assert live[0].ended
    assert live[0] not in run.scheduler.live
    results = run.finish()
    assert results[1:] == alone(zoo_file(model), requests)[1:]
    if isinstance(run.scheduler.requests, PagedRequests):
        assert_no_page_is_lost(run.scheduler.requests)


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_a_request_harms_no_other(zoo_file: ZooFile, place: str) -> None:
    def failing(done: int, total: int) -> None:
        raise RuntimeError("the caller's callback")

    model, positions, others = PLACES[place]
    run = Run(engine_of(zoo_file(model), exact, positions, others))
    good = request(prompt(30), 20)
    bad = [request(prompt(CONTEXT + 1), 5), request(prompt(30, 4), 5, progress=failing)]
    results = run.finish({0: [good], 2: [bad[0]], 3: [bad[1]]})
    assert results == [*alone(zoo_file(model), [good]), [], []]
    assert isinstance(run.live[1].error, ContextOverflowError)
    assert "the caller's callback" in str(run.live[2].error)


@pytest.mark.slow
def test_requests_wait_for_pages(zoo_file: ZooFile) -> None:
    """Five requests of about 80 tokens in a cache of 128."""
    run, requests, path = paged(zoo_file, positions=128)
    wanted = [request(prompt(30 + seed, seed), 50, seed=seed, **SEEDED) for seed in range(5)]
    arrivals = {3 * index: [each] for index, each in enumerate(wanted)}
    assert run.finish(arrivals) == alone(path, wanted)
    assert_no_page_is_lost(requests)


@pytest.mark.slow
def test_a_request_may_fill_the_context(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    wanted = [request(prompt(100), 200), request(prompt(CONTEXT, 1), 5), request(prompt(90, 2), 10)]
    assert run.finish({0: wanted}) == alone(path, wanted)
    assert [live.sequence.reason for live in run.live] == ["context", "context", "length"]


@pytest.mark.slow
def test_a_full_context_is_shifted_in_a_batch(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    shifted = request(prompt(100), 60, context_shift=ContextShift(4, CONTEXT))
    other = request(prompt(20, 1), 90)
    results = run.finish({0: [shifted, other]})
    assert [len(ids) for ids in results] == [60, 90]
    assert results[1] == alone(path, [other])[0]
    assert (run.live[0].sequence.shifts, run.live[0].sequence.evicted) == (1, 32)


def test_what_a_shifted_text_caches_is_no_prefix_of_others(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    run.finish({0: [request(prompt(100), 60, context_shift=ContextShift(4, CONTEXT))]})
    held = [*run.engine.ids[:60], 9]
    plain = request(held, 10)
    run.add(request(prompt(8, 5), 30))
    assert run.finish({1: [plain]})[2] == alone(path, [plain])[0]


def test_the_engine_may_be_used_otherwise_between_two_steps(zoo_file: ZooFile) -> None:
    run, requests, path = paged(zoo_file)
    wanted = [request(prompt(40), 20), request(prompt(30, 1), 20)]
    live = [run.add(each) for each in wanted]
    for _ in range(12):
        run.step()
        run.scheduler.suspend()
        run.engine.rewind(0)
        run.engine.append(prompt(50, 7))
    assert run.finish() == alone(path, wanted)
    assert live[0].timer.cached_tokens == 0
    assert_no_page_is_lost(requests)


def test_the_engine_uses_pages_of_other_requests(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file, positions=CONTEXT)
    wanted = [request(prompt(30), 20), request(prompt(40, 1), 20)]
    for each in wanted:
        run.add(each)
    for _ in range(8):
        run.step()
    run.engine.append(prompt(CONTEXT, 7))
    assert run.finish() == alone(path, wanted)


@pytest.mark.slow
def test_pulled_requests_advance_alternately(zoo_file: ZooFile) -> None:
    """Three requests of about 80 tokens in a cache of 128; each pauses for two thirds of the steps."""
    path = zoo_file("llama")
    wanted = [request(prompt(60 + seed, seed), 20, seed=seed, **SEEDED) for seed in range(3)]
    run = Run(engine_of(path, positions=CONTEXT))
    live = [run.add(each) for each in wanted]
    for each in live:
        each.on_change = None
    while run.scheduler.live or any(not each.ended for each in live):
        for each in live:
            for _ in range(5):
                if not each.ended:
                    run.pull(each)
    assert [[token.id for token in each.sequence.sampled] for each in live] == alone(path, wanted)


def test_paused_requests_leave_the_fast_path_to_one(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    paused, other = request(prompt(20), 5), request(prompt(20, 1), 60)
    first = run.add(paused)
    first.on_change = None
    run.pull(first)
    second = run.add(other)
    for _ in range(PAUSED_STEPS + 3):
        run.step()
    assert second.is_alone
    while not first.ended:
        run.pull(first)
    assert run.finish()[1] == alone(path, [other])[0]
    assert [token.id for token in first.sequence.sampled] == alone(path, [paused])[0]


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.every_case) for seed in range(6, 12))]
)
def test_random_arrivals_pauses_cancellations_and_other_uses(zoo_file: ZooFile, seed: int) -> None:
    """Prompts share prefixes, and the cache holds about two of them."""
    rng, path = random.Random(seed), zoo_file("llama")
    run, requests, _ = paged(zoo_file, positions=16 * rng.randrange(9, 20))
    stems = [prompt(rng.randrange(1, 90), stem) for stem in range(3)]
    wanted, cancelled = [], set[int]()
    for index in range(14):
        ids = [*rng.choice(stems), *prompt(rng.randrange(1, 20), 100 + index)]
        wanted.append(request(ids, rng.randrange(1, 60), seed=index, temperature=rng.choice([0.0, 1.0])))
    for step in range(4000):
        if len(run.live) < len(wanted) and rng.random() < 0.15:
            live = run.add(wanted[len(run.live)])
            live.on_change = None if rng.random() < 0.4 else live.on_change
        action = rng.random()
        if action < 0.02 and run.live:
            index = rng.randrange(len(run.live))
            run.live[index].cancelled = True
            cancelled.add(index)
        elif action < 0.06:
            run.scheduler.suspend()
            run.engine.rewind(rng.randrange(len(run.engine.ids) + 1))
            run.engine.append(prompt(rng.randrange(1, 40), step)[: run.engine.cache.free])
        pulled = [each for each in run.live if each.on_change is None and not each.ended]
        run.pull(rng.choice(pulled)) if pulled and rng.random() < 0.7 else run.step()
        if len(run.live) == len(wanted) and not run.scheduler.live:
            break
    assert all(each.error is None for each in run.live)
    expected = alone(path, wanted)
    for index, each in enumerate(run.live):
        if index not in cancelled:
            assert [token.id for token in each.sequence.sampled] == expected[index]
    assert_no_page_is_lost(requests)


def test_readers_that_wait_at_the_same_time_share_steps(zoo_file: ZooFile) -> None:
    run, _, path = paged(zoo_file)
    wanted = [request(prompt(20 + seed, seed), 30) for seed in range(2)]
    live = [run.add(each) for each in wanted]
    for each in live:
        each.on_change, each.is_awaited = None, True
    for _ in range(40):
        run.step()
    assert [each.ended for each in live] == [True, True]
    shared = live[0].generation([]).speed.tokens_per_forward
    assert shared is not None
    assert shared > 1.9
    assert [[token.id for token in each.sequence.sampled] for each in live] == alone(path, wanted)


@pytest.mark.slow
def test_a_short_prompt_waits_only_for_the_pages_that_it_shares(zoo_file: ZooFile) -> None:
    path, shared = zoo_file("llama"), prompt(300)
    run = Run(engine_of(path, positions=2048, context=1024))
    long, short = request([*shared, *prompt(600, 1)], 3), request([*shared, *prompt(5, 2)], 3)
    run.add(long)
    run.add(short)
    while run.live[1].phase != "decoding":
        run.step()
    assert run.live[0].phase == "reading"
    assert run.live[1].timer.cached_tokens == 288
    assert run.finish()[1] == Run(engine_of(path, context=1024, positions=1024)).finish({0: [short]})[0]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("model", ["lfm2", "gemma3"])
def test_requests_with_the_same_prompt_copy_the_state_that_has_read_it(zoo_file: ZooFile, model: str) -> None:
    run = Run(engine_of(zoo_file(model), others=2))
    requests = [request(prompt(90), 12, seed=seed, **SEEDED) for seed in range(3)]
    assert run.finish({0: requests}) == alone(zoo_file(model), requests)
    read_again = [90 - live.timer.cached_tokens for live in run.live]
    assert read_again[0] == 90
    assert max(read_again[1:]) <= 16


@pytest.mark.parametrize("model", ["lfm2", "gemma3"])
def test_a_system_prompt_is_read_once_and_its_state_stays_with_the_first_request(
    zoo_file: ZooFile, model: str
) -> None:
    run = Run(engine_of(zoo_file(model), others=2))
    requests = [request([*prompt(80), *prompt(20, seed)], 8) for seed in (1, 2)]
    assert run.finish({0: requests[:1], 30: requests[1:]}) == alone(zoo_file(model), requests)
    assert run.live[1].timer.cached_tokens >= 64
