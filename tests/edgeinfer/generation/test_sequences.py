"""Several completions of one prompt: each equals a separate completion."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from edgeinfer.generation.batching.engine_requests import EngineRequests
from edgeinfer.generation.batching.paged_cache import PAGES_PER_RUN
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.generation.shared_prefix import AlternatingSequences, CacheFullError
from edgeinfer_kernels.backend import PAGE
from tests.edgeinfer.fake_engine import END, FakeEngine, model_on, seeded_logits

PROMPT = "Once upon a time, there was a little girl named Lily."
VARIED: dict[str, Any] = {"temperature": 1.1, "seed": 5}


@pytest.fixture(scope="module")
def tiny(without_amx: None) -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=512) as model:
        yield model


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_each_sequence_equals_a_single_completion_of_its_seed(tiny: Model, count: int) -> None:
    actual = tiny.generate(PROMPT, n=count, max_tokens=40, **VARIED)
    assert len(actual) == count
    for index, completion in enumerate(actual):
        expected = tiny.generate(PROMPT, max_tokens=40, temperature=1.1, seed=5 + index)
        assert (completion.ids, completion.text, completion.finish_reason) == (
            expected.ids,
            expected.text,
            expected.finish_reason,
        )


def test_penalties_stops_and_logprobs_work_in_each_sequence(tiny: Model) -> None:
    settings: dict[str, Any] = {
        "temperature": 0.9, "repeat_penalty": 1.2, "dry_multiplier": 0.5, "mirostat": 2, "stop": ["."],
        "logprobs": 1, "max_tokens": 50,
    }  # fmt: skip
    actual = tiny.generate(PROMPT, n=5, seed=1, **settings)
    for index, completion in enumerate(actual):
        expected = tiny.generate(PROMPT, seed=1 + index, **settings)
        assert (completion.ids, completion.tokens, completion.finish_reason) == (
            expected.ids, expected.tokens, expected.finish_reason,
        )  # fmt: skip


@pytest.mark.slow
def test_sequences_without_memory_wait_for_others(tiny: Model) -> None:
    """Six completions of 200 tokens don't fit a context of 512 at once."""
    actual = tiny.generate(PROMPT, n=6, max_tokens=200, **VARIED)
    for index, completion in enumerate(actual):
        expected = tiny.generate(PROMPT, max_tokens=200, temperature=1.1, seed=5 + index)
        assert completion.ids == expected.ids


@pytest.mark.slow
def test_one_sequence_may_fill_the_context_to_the_last_token(tiny: Model) -> None:
    ids = tiny.tokenizer.encode(PROMPT * 40)[:490]
    actual = tiny.generate(ids, n=3, temperature=1.5, seed=2)
    # The others give their pages up and read their tokens again, in smaller chunks, which round differently.
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=512) as fresh:
        assert fresh.generate(ids, temperature=1.5, seed=2).ids == actual[0].ids
    assert [(len(each.ids), each.finish_reason) for each in actual] == [(22, "context")] * 3


@pytest.mark.slow
def test_the_prompt_stays_unchanged_in_the_cache(tiny: Model) -> None:
    expected = tiny.generate(3 * PROMPT, max_tokens=30, temperature=0.0)
    tiny.generate(3 * PROMPT, n=4, max_tokens=60, **VARIED)
    again = tiny.generate(3 * PROMPT, max_tokens=30, temperature=0.0)
    assert again.speed.cached_tokens > len(expected.prompt_ids) - 1 - PAGE
    assert again.ids == expected.ids


def test_the_best_of_several_is_the_most_probable_of_them(tiny: Model) -> None:
    completions = tiny.generate(PROMPT, n=6, max_tokens=25, logprobs=0, **VARIED)
    means = [float(np.mean([token.logprob for token in completion.tokens])) for completion in completions]
    order = sorted(range(6), key=lambda index: -means[index])
    best = tiny.generate(PROMPT, best_of=6, max_tokens=25, **VARIED)
    assert best.ids == completions[order[0]].ids
    assert best.mean_logprob == pytest.approx(means[order[0]])
    two = tiny.generate(PROMPT, n=2, best_of=6, max_tokens=25, **VARIED)
    assert [completion.ids for completion in two] == [completions[index].ids for index in order[:2]]


@pytest.mark.slow
def test_batched_beams_equal_sequential_beams(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"n": 4, "beams": 4, "max_tokens": 30, "repeat_penalty": 1.1}
    actual = tiny.generate(PROMPT, **settings)
    monkeypatch.setattr(PagedRequests, "sequences", lambda _: AlternatingSequences(tiny.engine))
    expected = tiny.generate(PROMPT, **settings)
    assert [completion.ids for completion in actual] == [completion.ids for completion in expected]
    means = [completion.mean_logprob or 0.0 for completion in actual]
    assert means == sorted(means, reverse=True)


def test_one_beam_is_the_greedy_completion(tiny: Model) -> None:
    expected = tiny.generate(PROMPT, max_tokens=40, temperature=0.0)
    actual = tiny.generate(PROMPT, max_tokens=40, beams=1)
    assert (actual.ids, actual.text, actual.finish_reason) == (
        expected.ids,
        expected.text,
        expected.finish_reason,
    )


TEXT_TOKENS = (10, 11, 12)


def three_words(ids: list[int]) -> npt.NDArray[np.float32]:
    """Only three tokens and the end may follow."""
    logits = np.full_like(seeded_logits(ids), -80)
    logits[[*TEXT_TOKENS, END]] = np.random.default_rng(ids).standard_normal(4) * 2
    return logits


def logprob(ids: list[int], token: int) -> float:
    logits = three_words(ids).astype(np.float64)
    return float(logits[token] - np.log(np.exp(logits).sum()))


def all_answers(prompt: list[int], limit: int) -> dict[tuple[int, ...], float]:
    """Every completion of at most `limit` tokens, with its log-probability per token, its end counted."""
    result = {}
    for length in range(limit + 1):
        for output in product(TEXT_TOKENS, repeat=length):
            tokens = [*output, END] if length < limit else [*output]
            probs = [logprob([*prompt, *tokens[:index]], token) for index, token in enumerate(tokens)]
            result[output] = sum(probs) / len(probs)
    return result


def test_enough_beams_find_the_most_probable_completions() -> None:
    prompt, limit = [1, 5, 6], 4
    truth = sorted(all_answers(prompt, limit).items(), key=lambda pair: -pair[1])
    actual = model_on(FakeEngine(three_words)).generate(prompt, n=6, beams=120, max_tokens=limit)
    assert [tuple(completion.ids) for completion in actual] == [output for output, _ in truth[:6]]
    for completion, (output, mean) in zip(actual, truth, strict=False):
        assert completion.mean_logprob == pytest.approx(mean, abs=1e-5)
        assert completion.finish_reason == ("length" if len(output) == limit else "stop")


def test_an_engine_without_batches_runs_sequences_one_by_one() -> None:
    engine = FakeEngine(seeded_logits)
    model = model_on(engine)
    assert isinstance(model.completer.scheduler.requests, EngineRequests)
    actual = model.generate([1, 5, 6], n=3, max_tokens=6, **VARIED)
    reads = sum(engine.read)
    expected = [model.generate([1, 5, 6], max_tokens=6, temperature=1.1, seed=5 + i).ids for i in range(3)]
    assert [completion.ids for completion in actual] == expected
    assert reads == 3 + 1 + 1 + 3 * 5  # the prompt, twice its last token, and each completion but its last


def test_beams_share_pages_until_they_differ_and_leave_an_idle_prefix(tiny: Model) -> None:
    requests, engine = tiny.completer.scheduler.requests, tiny.engine
    assert isinstance(requests, PagedRequests)
    requests.cache.store()
    ids = tiny.tokenizer.encode(PROMPT * 3)[: 2 * PAGE + 4]
    engine.append(ids)
    beams, total = requests.sequences(), requests.cache.total
    free = requests.cache.free
    beams.read([(beams.first, 5)])
    assert requests.cache.free == free  # it continues in the last page of the prompt
    second = beams.fork(beams.first)
    free = requests.cache.free
    beams.read([(beams.first, 6), (second, 7)])
    assert requests.cache.free >= free - PAGES_PER_RUN
    with pytest.raises(CacheFullError):
        beams.read([(second, 5)] * 500)
    beams.close()
    assert requests.cache.free + requests.cache.idle == total
    assert requests.cache.matched([*ids, 5]) == 2 * PAGE


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"n": 0}, "n: saw 0, wanted a whole number from 1 to 256"),
        ({"best_of": True}, "best_of: saw True, wanted"),
        ({"n": 3, "best_of": 2}, "best_of: saw 2, wanted at least the 3 completions of n"),
        ({"beams": 2, "best_of": 2}, "sampling and beam search exclude each other"),
        ({"beams": 2, "stop": "x"}, "a beam ends where the model ends it"),
    ],
)
def test_invalid_counts_are_refused(counts: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        model_on(FakeEngine(seeded_logits)).generate([1, 5, 6], max_tokens=2, **counts)


def test_each_sequence_follows_the_grammar_separately(tiny: Model) -> None:
    actual = tiny.generate(
        PROMPT, n=5, grammar='start: "yes" | "no" | "maybe"', max_tokens=9, temperature=3.0
    )
    assert {completion.text for completion in actual} <= {"yes", "no", "maybe"}
    assert {completion.finish_reason for completion in actual} == {"stop"}
    with pytest.raises(SettingError, match="beam search doesn't support them"):
        tiny.generate(PROMPT, beams=2, grammar='start: "yes"')
