"""Completions whose drafts are made and verified several at a time: they equal those without drafts."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.draft_verification import HeadRun
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.results import Generation
from edgeinfer.speculation.draft_controller import MAX_CREDIT, DraftStats
from edgeinfer_kernels.draft_loop import CyclesRequest, DraftCycle
from tests.edgeinfer.speculation.test_drafting import always_draft

pytestmark = pytest.mark.default_cases(1)
CPU: dict[str, Any] = {"device": "cpu", "context": 256}
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "Ben and Mia went to the park. They saw",
    "Max was a dog. He lived with",
    "x = 12; y =",
    [{"role": "user", "content": "Tell me a story about a brave hedgehog."}],
)


def always_run(model: Model, length: int, cycles: int) -> None:
    """Drafts of this length, in runs of this many."""
    always_draft(model, length)
    assert model.speculator is not None
    for controller in model.speculator.controllers.values():
        setattr(controller, "cycles", lambda _: cycles)  # noqa: B010
        controller.account = MAX_CREDIT


class Runs(list[list[DraftCycle]]):
    """The runs of a model since the last `clear`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        run_cycles = NativeEngine.run_cycles

        def listed(engine: NativeEngine, head: HeadRun, run: CyclesRequest) -> list[DraftCycle]:
            self.append(run_cycles(engine, head, run))
            return self[-1]

        monkeypatch.setattr(NativeEngine, "run_cycles", listed)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


class Baseline:
    """A model without drafts, whose completions are made once: several tests have the same."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._made = dict[str, Generation]()

    def generate(self, prompt: Any, **settings: Any) -> Generation:
        key = repr((prompt, sorted(settings.items())))
        if key not in self._made:
            self._made[key] = self.model.generate(prompt, **settings)
        return self._made[key]


@pytest.fixture(scope="module")
def plain() -> Iterator[Baseline]:
    with edgeinfer.load("tiny", draft=None, threads=1, **CPU) as model:
        yield Baseline(model)


@pytest.fixture(scope="module", params=[1, 2])
def running(request: pytest.FixtureRequest) -> Iterator[Model]:
    with edgeinfer.load("tiny", draft="mtp", threads=request.param, **CPU) as model:
        yield model


def both(plain: Baseline, running: Model, prompt: Any, **settings: Any) -> Generation:
    """The completion with drafts, which must equal the one without."""
    expected = plain.generate(prompt, temperature=0.0, **settings)
    actual: Generation = running.generate(prompt, temperature=0.0, **settings)
    assert actual.ids == expected.ids
    assert (actual.text, actual.finish_reason) == (expected.text, expected.finish_reason)
    return actual


@pytest.mark.default_cases
@pytest.mark.parametrize(("length", "cycles"), [(1, 2), (3, 8), (7, 3)])
def test_completions_equal_baseline_decoding(
    plain: Baseline, running: Model, runs: Runs, length: int, cycles: int
) -> None:
    always_run(running, length, cycles)
    for prompt in PROMPTS:
        runs.clear()
        actual = both(plain, running, prompt, max_tokens=60)
        assert max(map(len, runs)) == cycles
        assert sum(token.drafted for token in actual.tokens) > 0


def test_the_longest_run_has_space_for_all_its_states(plain: Baseline, running: Model, runs: Runs) -> None:
    always_run(running, 7, 16)
    both(plain, running, PROMPTS[0], max_tokens=200)  # raises ValueError if there isn't
    assert max(map(len, runs)) == 16


def test_each_number_of_tokens_ends_a_completion(plain: Baseline, running: Model) -> None:
    always_run(running, 3, 8)
    for tokens in (*range(1, 41, 2), *range(2, 41, 2)):
        actual = both(plain, running, PROMPTS[tokens % 2], max_tokens=tokens)
        assert len(actual.ids) == tokens


def test_stop_strings_and_end_tokens_end_a_completion(plain: Baseline, running: Model, runs: Runs) -> None:
    always_run(running, 4, 8)
    story = plain.generate(PROMPTS[0], max_tokens=60, temperature=0.0)
    for first in range(10, 100, 9):
        stop = story.text[first : first + 6]
        actual = both(plain, running, PROMPTS[0], max_tokens=60, stop=[stop])
        assert stop not in actual.text
        assert actual.finish_reason == "stop"
    ended = both(plain, running, PROMPTS[1], max_tokens=200)
    assert ended.finish_reason == "stop"  # by an end token, which is in the middle of the last run
    assert runs[-1][-1].found[-1] in running.tokenizer.end_ids


def test_a_full_context_ends_a_completion(plain: Baseline, running: Model, runs: Runs) -> None:
    always_run(running, 5, 8)
    ids = running.tokenizer.encode("Tom had a red ball. Sue had a blue ball. " * 20)
    for length in range(226, 256, 3):
        both(plain, running, ids[:length])
        assert len(running.engine.ids) <= 256
    assert runs


def test_a_shifted_context_is_continued(plain: Baseline, running: Model) -> None:
    always_run(running, 4, 8)
    both(plain, running, PROMPTS[0] * 12, max_tokens=150, context_overflow="shift")


def test_counts_and_speeds_are_those_of_single_drafts(running: Model, runs: Runs) -> None:
    always_run(running, 3, 5)
    many = running.generate(PROMPTS[0], max_tokens=50, temperature=0.0)
    assert runs
    runs.clear()
    always_run(running, 3, 1)  # of one draft there is no run
    single = running.generate(PROMPTS[0], max_tokens=50, temperature=0.0)
    assert not runs
    assert many.ids == single.ids
    assert [token.drafted for token in many.tokens] == [token.drafted for token in single.tokens]
    for name in ("accepted_share", "tokens_per_forward", "generated_tokens"):
        assert getattr(many.speed, name) == getattr(single.speed, name)


def test_acceptance_is_learned_as_from_single_drafts(running: Model, runs: Runs) -> None:
    assert running.speculator is not None
    controller, found = running.speculator.controllers["greedy"], list[tuple[float, float]]()
    for cycles in (1, 6):
        always_run(running, 3, cycles)
        controller.begin(DraftStats(0.5, 1.0, MAX_CREDIT))
        running.generate(PROMPTS[0], max_tokens=50, temperature=0.0)
        found.append((controller.stats.acceptance, controller.stats.trust))
        assert bool(runs) == (cycles > 1)
    assert found[1] == pytest.approx(found[0])
    assert found[0] != pytest.approx((0.5, 1.0))


def test_a_chat_continues_after_a_run(plain: Baseline, running: Model) -> None:
    always_run(running, 3, 8)
    chats = [model.chat() for model in (plain.model, running)]
    for message in ("Tell me a story about a cat.", "Tell me more.", "How does it end?"):
        texts = [chat.say(message, max_tokens=30, temperature=0.0).text for chat in chats]
        assert texts[0] == texts[1]


def test_a_cancelled_stream_leaves_a_cache_that_is_continued(plain: Baseline, running: Model) -> None:
    always_run(running, 4, 8)
    for tokens in (1, 2, 7, 12):
        stream = running.stream(PROMPTS[0], max_tokens=60, temperature=0.0)
        taken = [next(stream).id for _ in range(tokens)]
        stream.cancel()
        ids = [*running.tokenizer.encode(PROMPTS[0]), *taken[:-1], 5]
        both(plain, running, ids, max_tokens=20)


def test_a_snapshot_after_a_run_is_continued(plain: Baseline, running: Model) -> None:
    always_run(running, 4, 8)
    expected = plain.generate(PROMPTS[0], max_tokens=40, temperature=0.0)
    running.generate(PROMPTS[0], max_tokens=20, temperature=0.0)
    snapshot = running.engine.snapshot()
    assert snapshot is not None
    kept = replace(snapshot, ids=list(snapshot.ids), arrays=[array.copy() for array in snapshot.arrays])
    running.generate("Something else, which is longer than the text before it was.", max_tokens=40)
    running.engine.restore(kept, len(kept.ids))
    actual = running.generate([*expected.prompt_ids, *expected.ids[:20]], max_tokens=20, temperature=0.0)
    assert actual.ids == expected.ids[20:]


def test_streams_that_alternate_and_completions_at_once(plain: Baseline, running: Model) -> None:
    always_run(running, 3, 8)
    prompts = list(PROMPTS[:3])
    expected = [each.ids for each in plain.model.generate(prompts, max_tokens=40, temperature=0.0)]
    streams = [running.stream(prompt, max_tokens=40, temperature=0.0) for prompt in prompts]
    for _ in range(41):
        for stream in streams:
            next(stream, None)
    assert [stream.result.ids for stream in streams] == expected
    assert [each.ids for each in running.generate(prompts, max_tokens=40, temperature=0.0)] == expected


@pytest.mark.default_cases
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.8, "seed": 3}, {"temperature": 0.0, "repeat_penalty": 1.2}, {"logprobs": 2}],
)
def test_what_needs_logits_or_samples_has_no_runs(
    plain: Baseline, running: Model, runs: Runs, settings: dict[str, Any]
) -> None:
    always_run(running, 3, 8)
    settings = {"max_tokens": 30, "temperature": 0.0, **settings}
    assert running.generate(PROMPTS[0], **settings).ids == plain.generate(PROMPTS[0], **settings).ids
    assert not runs


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("kv", ["q8_0", "q4_0", "q8_0/q4_0", "f16"])
def test_caches_of_all_types_have_runs(runs: Runs, kv: str) -> None:
    settings: dict[str, Any] = {**CPU, "kv": kv, "threads": 1}
    with (
        edgeinfer.load("tiny", draft=None, **settings) as plain,
        edgeinfer.load("tiny", draft="mtp", **settings) as model,
    ):
        always_run(model, 3, 8)
        for prompt in PROMPTS:
            both(Baseline(plain), model, prompt, max_tokens=50)
    assert runs


def test_recent_positions_in_f16_have_no_runs(runs: Runs) -> None:
    with edgeinfer.load("tiny", draft="mtp", threads=1, kv="q4_0+f16", **CPU) as model:
        always_run(model, 3, 8)
        assert model.generate(PROMPTS[0], max_tokens=30, temperature=0.0).speed.accepted_share
    assert not runs


def test_asynchronous_streams_equal_baseline_decoding(plain: Baseline, running: Model, runs: Runs) -> None:
    always_run(running, 4, 8)

    async def tokens_of(prompt: str) -> list[int]:
        return [token.id async for token in running.stream_async(prompt, max_tokens=40, temperature=0.0)]

    async def at_once(prompts: Sequence[str]) -> list[list[int]]:
        return await asyncio.gather(*map(tokens_of, prompts))

    prompts = [str(prompt) for prompt in PROMPTS[:3]]
    expected = [plain.generate(prompt, max_tokens=40, temperature=0.0).ids for prompt in prompts]
    for prompt, ids in zip(prompts, expected, strict=True):
        runs.clear()
        assert asyncio.run(tokens_of(prompt)) == ids
        assert runs
    assert asyncio.run(at_once(prompts)) == expected
