"""Forced tokens of a grammar are emitted without sampling, and change nothing else."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import LogitsError
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.structured.constraint import Constraint, GrammarVocabulary
from edgeinfer.structured.grammars import json_schema
from tests.edgeinfer.fake_engine import FakeEngine, byte_ids, model_on, seeded_logits

pytest.importorskip("llguidance")

NAMED = {
    "type": "object",
    "properties": {
        "a_rather_long_name": {"enum": ["one_of_two", "two_of_two"]},
        "number": {"type": "number"},
        "within": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 12}, "known": {"type": "boolean"}},
            "required": ["text", "known"],
            "additionalProperties": False,
        },
    },
    "required": ["a_rather_long_name", "number", "within"],
    "additionalProperties": False,
}
PROMPT = [1, 5, 6]


class BatchEngine(FakeEngine):
    """`rows`: the token count of each forward."""

    def __init__(self) -> None:
        super().__init__(seeded_logits, 4096)
        self.passes: list[int] = []

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        self.passes.append(len(ids))
        return super().append_all(ids)


@pytest.fixture
def without_forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Switches forced tokens off, until the context exits."""

    def off() -> None:
        monkeypatch.setattr(Constraint, "forced", lambda self: [])

    yield off
    monkeypatch.undo()


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.3, "logit_bias": {20: 2.0}},
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.7, "seed": 5, "top_k": 0, "typical_p": 0.9},
    {"temperature": 0.7, "seed": 5, "top_k": 8, "xtc_probability": 0.5},
    {"temperature": 1.0, "seed": 2, "mirostat": 2},
    {"temperature": 1.0, "seed": 2, "dry_multiplier": 0.8, "presence_penalty": 0.5},
]


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("settings", SETTINGS)
def test_forced_tokens_do_not_change_a_completion(settings: dict[str, Any], without_forced: Any) -> None:
    at_once = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=NAMED, max_tokens=600, **settings
    )
    without_forced()
    completions = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=NAMED, max_tokens=600, **settings
    )
    assert at_once.ids == completions.ids
    assert at_once.finish_reason == completions.finish_reason
    assert sum(token.drafted for token in at_once.tokens) > 20
    assert not any(token.drafted for token in completions.tokens)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_sampler_chain_equals_sampling_from_masked_logits(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=NAMED, max_tokens=600, **settings
    )

    def masked(self: Sampler, logits: Any, history: Any) -> int:
        constraint, self.constraint = self.constraint, None
        assert constraint is not None
        token = result(self, np.where(constraint.allowed(), logits, np.float32(-np.inf)), history)
        self.constraint = constraint
        return token

    result = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", masked)
    monkeypatch.setattr(Constraint, "forced", lambda self: [])
    whole = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=NAMED, max_tokens=600, **settings
    )
    assert requested.ids == whole.ids


def test_forced_tokens_share_a_forward_if_the_engine_is_batch_invariant() -> None:
    engine = BatchEngine()
    tokenizer = model_on(engine).tokenizer
    model = Model("fake", engine, tokenizer, None, batch_invariant=True)
    completion = model.generate(PROMPT, schema=NAMED, max_tokens=400, seed=1)
    assert max(engine.passes) == 8
    assert completion.speed.tokens_per_forward is not None
    assert completion.speed.tokens_per_forward > 1.3
    read = model_on(other := BatchEngine()).generate(PROMPT, schema=NAMED, max_tokens=400, seed=1)
    assert other.passes == []
    assert read.speed.tokens_per_forward is None
    assert read.ids == completion.ids


def test_trailing_forced_tokens_need_no_forward() -> None:
    engine = FakeEngine(seeded_logits, 256)
    completion = model_on(engine).generate(PROMPT, grammar='root ::= "yes" | "no"', max_tokens=200)
    assert completion.finish_reason == "stop"
    assert engine.read == [len(PROMPT)]


def test_another_stream_may_interrupt_forced_tokens() -> None:
    model = model_on(FakeEngine(seeded_logits, 4096))
    alone = [model.generate(PROMPT, schema=NAMED, max_tokens=150, seed=seed).ids for seed in (1, 2)]
    streams = [model.stream(PROMPT, schema=NAMED, max_tokens=150, seed=seed) for seed in (1, 2)]
    for _ in zip(*streams, strict=False):
        pass
    for stream in streams:
        list(stream)
    assert [stream.result.ids for stream in streams] == alone


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("limit", range(1, 40))
def test_a_limit_can_end_a_completion_within_forced_tokens(limit: int) -> None:
    whole = model_on(FakeEngine(seeded_logits, 4096)).generate(PROMPT, schema=NAMED, max_tokens=40, seed=1)
    shortened = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=NAMED, max_tokens=limit, seed=1
    )
    assert shortened.ids == whole.ids[:limit]
    full = model_on(FakeEngine(seeded_logits, len(PROMPT) + limit)).generate(PROMPT, schema=NAMED, seed=1)
    assert full.ids == whole.ids[:limit]
    assert (shortened.finish_reason, full.finish_reason) == ("length", "context")


def test_requested_logprobs_include_forced_tokens() -> None:
    completion = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=NAMED, max_tokens=60, seed=1, logprobs=2
    )
    assert all(token.logprob is not None for token in completion.tokens)
    plain = model_on(FakeEngine(seeded_logits, 4096)).generate(PROMPT, schema=NAMED, max_tokens=60, seed=1)
    assert plain.ids == completion.ids


def test_a_forced_token_banned_by_a_bias_is_an_error() -> None:
    banned = {byte_ids("_")[0]: -np.inf}
    with pytest.raises(LogitsError, match="-inf for all"):
        model_on(FakeEngine(seeded_logits, 4096)).generate(PROMPT, schema=NAMED, seed=1, logit_bias=banned)


def test_a_forced_token_advances_the_sampler() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[7] = 1.0
    for settings in ({"temperature": 0.0, "seed": 1}, {"seed": 1}, {"seed": 1, "mirostat": 2}):
        taken, sampled = (Sampler(SamplingParams.from_keywords(settings), 50) for _ in range(2))
        assert sampled.sample(logits, [1]) == 7
        sampled.accept(7)
        assert taken.take(7)
        assert taken.snapshot() == sampled.snapshot()


def test_forced_tokens_are_the_only_allowed_ones_in_a_real_vocabulary() -> None:
    certain = few = 0
    with edgeinfer.load("tiny", device="cpu", draft=None) as model:
        vocabulary = GrammarVocabulary(model.tokenizer, model.engine.vocabulary_size)
        random = np.random.default_rng(1)
        for _ in range(6):
            constraint = vocabulary.constraint(json_schema(NAMED))
            while not constraint.finished:
                forced, ids = constraint.forced(), np.flatnonzero(constraint.allowed())
                listed = constraint.few()
                if listed is not None:
                    np.testing.assert_array_equal(listed, ids)
                    few += 1
                if forced:
                    assert ids.tolist() == [forced[0]]
                    certain += 1
                constraint.accept(int(random.choice(ids)))
    assert certain > 10
    assert few > 60


@pytest.mark.slow
def test_forced_tokens_do_not_change_the_built_in_model(without_forced: Any) -> None:
    completions = []
    with edgeinfer.load("tiny", device="cpu", draft=None) as model:
        for _ in range(2):
            expected: list[Any] = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 3}]
            for settings in expected:
                completion = model.generate("Once", schema=NAMED, max_tokens=200, **settings)
                json.loads(completion.text)
                completions.append(completion.ids)
            without_forced()
    assert completions[:2] == completions[2:]


@pytest.mark.slow
def test_forced_tokens_do_not_change_a_context_shift(
    without_forced: Any,
) -> None:
    completions = []
    many = {"type": "array", "items": NAMED, "minItems": 9, "maxItems": 9}
    with edgeinfer.load("tiny", device="cpu", draft=None, context=96) as model:
        for _ in range(2):
            completion = model.generate("Once", schema=many, context_overflow="shift", max_tokens=300, seed=3)
            assert completion.context_shifts >= 2
            completions.append(completion.ids)
            without_forced()
    assert completions[0] == completions[1]
