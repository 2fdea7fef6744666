"""Completions that follow a schema or a grammar, whatever the logits."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import LogitsError, SettingError
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.structured.constraint import Constraint, GrammarVocabulary
from edgeinfer.structured.grammars import grammar, json_schema
from tests.edgeinfer.fake_engine import END, FakeEngine, byte_ids, model_on, seeded_logits

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
PROMPT = [1, 5, 6]


def matches_person(result: Any) -> bool:
    return (
        set(result) == {"name", "age", "pets"}
        and len(result["name"]) <= 8
        and 0 <= result["age"] <= 99
        and set(result["pets"]) <= {"cat", "dog"}
        and len(result["pets"]) <= 2
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "repeat_penalty": 1.5, "dry_multiplier": 0.8},
        {"temperature": 0.8, "mirostat": 2},
        {"temperature": 1.0, "logit_bias": {END: 50.0}},
    ],
)
def test_random_logits_give_json_of_the_schema(sampling: dict[str, Any]) -> None:
    model = model_on(FakeEngine(seeded_logits, 4096))
    for seed in range(4):
        completion = model.generate(PROMPT, schema=PERSON, seed=seed, max_tokens=2000, **sampling)
        assert completion.finish_reason == "stop"
        assert matches_person(json.loads(completion.text)), completion.text


def test_a_completion_ends_with_its_grammar_without_eos() -> None:
    engine = FakeEngine(seeded_logits, 256)
    completion = model_on(engine).generate(PROMPT, grammar='root ::= "yes" | "no"', max_tokens=200)
    assert completion.text in ("yes", "no")
    assert completion.finish_reason == "stop"
    assert engine.ids == PROMPT


def test_eos_is_allowed_where_the_grammar_may_end_or_continue() -> None:
    def eager(ids: list[int]) -> np.ndarray:
        logits = seeded_logits(ids)
        logits[END] = 20.0
        return logits

    completion = model_on(FakeEngine(eager, 256)).generate(PROMPT, grammar="root ::= [a-c]{2,}")
    assert re.fullmatch("[a-c]{2}", completion.text)
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("text", ['root ::= [a-z]{3} "!"', 'start: /[a-z]{3}/ "!"'])
def test_a_grammar_is_parsed_in_either_syntax(text: str) -> None:
    completion = model_on(FakeEngine(seeded_logits, 256)).generate(PROMPT, grammar=text, seed=3)
    assert re.fullmatch("[a-z]{3}!", completion.text)


def test_a_schema_may_be_a_string() -> None:
    completion = model_on(FakeEngine(seeded_logits, 256)).generate(
        PROMPT, schema='{"enum": ["left", "right"]}'
    )
    assert json.loads(completion.text) in ("left", "right")


def test_a_truncated_completion_follows_the_schema() -> None:
    completion = model_on(FakeEngine(seeded_logits, 256)).generate(PROMPT, schema=PERSON, max_tokens=6)
    assert completion.finish_reason == "length"
    assert re.match(r'\{\s*"n', completion.text)


def test_a_stop_string_ends_it_earlier() -> None:
    model = model_on(FakeEngine(seeded_logits, 4096))
    completion = model.generate(PROMPT, schema=PERSON, stop='"age"', max_tokens=500)
    assert "age" not in completion.text
    assert '"name"' in completion.text


def test_chat_responses_follow_the_schema() -> None:
    chat = model_on(FakeEngine(seeded_logits, 4096)).chat()
    assert matches_person(json.loads(chat.say("Who?", schema=PERSON, max_tokens=1500).text))
    assert chat.say("And?", grammar='root ::= "nobody"').text == "nobody"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength (5) is greater than maxLength (2)"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"allOf": [{"type": "string"}, {"type": "number"}]}, "Unsatisfiable schema: incompatible types"),
        (False, "Unsatisfiable schema: schema is false"),
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
        ({"type": "wish"}, "Invalid type: wish"),
        ({"if": {}}, 'Unimplemented keys: ["if"]'),
        ("{", "saw no JSON"),
        ("[]", "saw list [], wanted a JSON schema"),
        ({"enum": [{1, 2}]}, "wanted what JSON can hold"),
    ],
)
def test_an_unsatisfiable_schema_is_refused_before_prefill(schema: Any, message: str) -> None:
    engine = FakeEngine(seeded_logits)
    with pytest.raises(SettingError) as caught:
        model_on(engine).stream(PROMPT, schema=schema)
    assert str(caught.value).startswith("schema: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not engine.read


@pytest.mark.parametrize("text", ["root ::= (", "root ::= nothing", "start: /(/", ""])
def test_an_invalid_grammar_gives_a_one_line_error(text: str) -> None:
    with pytest.raises(SettingError, match=r"^grammar: .+$"):
        model_on(FakeEngine(seeded_logits)).stream(PROMPT, grammar=text)


def test_a_schema_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="saw both, wanted one of them"):
        model_on(FakeEngine(seeded_logits)).stream(PROMPT, schema={}, grammar='root ::= "a"')


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SettingError, match=r"need llguidance, .*pip install 'edgeinfer\[structured\]'"):
        model_on(FakeEngine(seeded_logits)).stream(PROMPT, schema={})


def test_forced_tokens_are_found() -> None:
    model = model_on(FakeEngine(seeded_logits))
    vocabulary = GrammarVocabulary(model.tokenizer, model.engine.vocabulary_size)
    constraint = vocabulary.constraint(grammar('root ::= "abc" [0-9]'))
    constraint.accept(byte_ids("a")[0])
    assert constraint.forced() == byte_ids("bc")
    assert np.flatnonzero(constraint.allowed()).tolist() == byte_ids("b")
    assert not constraint.finished


def constraint_pairs(vocabulary: GrammarVocabulary, steps: int) -> Iterator[tuple[Constraint, Constraint]]:
    """Two equal constraints, at every step of a random walk."""
    random = np.random.default_rng(2)
    one, other = (vocabulary.constraint(json_schema(PERSON)) for _ in range(2))
    for _ in range(steps):
        yield one, other
        token = int(random.choice(np.flatnonzero(other.allowed())))
        one.accept(token)
        other.accept(token)
        if one.finished:
            break


def test_checking_one_token_equals_the_full_mask() -> None:
    model = model_on(FakeEngine(seeded_logits))
    size = model.engine.vocabulary_size
    ends = 0
    for alone, among in constraint_pairs(GrammarVocabulary(model.tokenizer, size), 60):
        allowed_by_token = [alone.allows(token) for token in range(size)]
        np.testing.assert_array_equal(allowed_by_token, among.allowed())
        assert [among.allows(token) for token in range(size)] == allowed_by_token
        ends += allowed_by_token[END]
    assert ends <= 1


def test_an_overlapped_mask_equals_a_synchronous_one() -> None:
    model = model_on(FakeEngine(seeded_logits))
    vocabulary = GrammarVocabulary(model.tokenizer, model.engine.vocabulary_size, spare_core=True)
    for overlapped, at_once in constraint_pairs(vocabulary, 60):
        overlapped.begin()
        overlapped.begin()
        assert overlapped.forced() == at_once.forced()
        assert overlapped.finished == at_once.finished
        assert overlapped.allows(5) == at_once.allows(5)
        overlapped.begin()
        np.testing.assert_array_equal(overlapped.allowed(), at_once.allowed())
        at_once.begin()


class Allowing:
    """A constraint that allows these tokens; `requested`: how often the full mask was requested."""

    def __init__(self, mask: Any) -> None:
        self.mask, self.requested = mask, 0

    def begin(self) -> None:
        """No forced tokens."""

    def allows(self, token_id: int) -> bool:
        return bool(self.mask[token_id])

    def few(self) -> Any:
        self.requested += 1
        return np.flatnonzero(self.mask) if 0 < self.mask.sum() <= 64 else None

    def allowed(self) -> Any:
        self.requested += 1
        return self.mask

    def token_or_ending(self, token_id: int) -> int:
        return token_id

    def accept(self, token_id: int) -> None:
        """It always allows the same."""


@pytest.mark.default_cases
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.6, 0.999])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 5, "typical_p": 0.7},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"repeat_penalty": 1.3, "logit_bias": {7: 3.0}},
        {"mirostat": 2},
    ],
)
def test_samples_follow_the_masked_distribution(share: float, settings: dict[str, Any]) -> None:
    random = np.random.default_rng(4)
    size, history = 6000, [7, 9, 11]
    logits = (3 * random.standard_normal(size)).astype(np.float32)
    mask = random.random(size) < share
    mask[17] = True
    chain = SamplingParams.from_keywords({"temperature": 0.8, "seed": 1, **settings})
    ids, probs = Sampler(chain, size, constraint=Allowing(mask)).distribution(logits, history)
    masked = np.where(mask, logits, np.float32(-np.inf))
    expected_ids, expected = Sampler(chain, size).distribution(masked, history)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(probs, expected, rtol=1e-6)
    assert mask[ids].all()


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_the_most_probable_allowed_token_is_sampled(penalty: float) -> None:
    settings = SamplingParams(temperature=0.0, repeat_penalty=penalty)
    logits = np.array([1.0, 5.0, 3.0, 4.0], np.float32)
    for mask, best in (([1, 1, 0, 0], 1), ([1, 0, 1, 0], 2), ([0, 0, 1, 1], 3)):
        constraint = Allowing(np.array(mask, bool))
        assert Sampler(settings, 4, constraint=constraint).sample(logits, [0]) == best
        assert constraint.requested == (best != 1)


def test_a_non_finite_logit_is_reported_under_any_mask() -> None:
    logits = np.array([1.0, np.nan], np.float32)
    sampler = Sampler(SamplingParams(temperature=0.0), 2, constraint=Allowing(np.array([True, True])))
    with pytest.raises(LogitsError, match="saw NaN"):
        sampler.sample(logits, [0])


def test_json_true_is_a_schema() -> None:
    model = model_on(FakeEngine(seeded_logits))
    constraint = GrammarVocabulary(model.tokenizer, model.engine.vocabulary_size).constraint(
        json_schema(True)
    )
    assert {byte_ids(text)[0] for text in '{["1tfn-'} <= set(np.flatnonzero(constraint.allowed()).tolist())
    assert byte_ids("x")[0] not in np.flatnonzero(constraint.allowed())


@pytest.mark.slow
def test_forced_tokens_share_a_forward_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = {
        "type": "object",
        "properties": {"a_rather_long_name": {"enum": ["one_of_two", "two_of_two"]}},
        "required": ["a_rather_long_name"],
        "additionalProperties": False,
    }
    completions, passes = [], []
    with edgeinfer.load("tiny", device="cpu", draft="lookup") as model:
        for forced in (True, False):
            if not forced:
                monkeypatch.setattr(Constraint, "forced", lambda self: [])
            expected: list[Any] = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 3}]
            for settings in expected:
                completion = model.generate("Once", schema=schema, max_tokens=100, **settings)
                assert json.loads(completion.text)["a_rather_long_name"] in ("one_of_two", "two_of_two")
                completions.append(completion.ids)
                passes.append(completion.speed.tokens_per_forward or 1.0)
    assert completions[:2] == completions[2:]
    assert min(passes[:2]) > 1.3
    assert passes[2:] == [1.0, 1.0]


@pytest.mark.slow
def test_a_draft_does_not_change_the_built_in_model() -> None:
    completions = []
    for draft in (None, "auto"):
        with edgeinfer.load("tiny", device="cpu", draft=draft) as model:
            expected: list[Any] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}]
            for settings in expected:
                completion = model.generate("Once", schema=PERSON, max_tokens=300, **settings)
                assert matches_person(json.loads(completion.text))
                completions.append(completion.ids)
    assert completions[:2] == completions[2:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_empty_mask_is_reported(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 6, constraint=Allowing(np.zeros(6, bool)))
    with pytest.raises(LogitsError, match="saw -inf for all 6 tokens"):
        sampler.sample(np.arange(6, dtype=np.float32), [0])
