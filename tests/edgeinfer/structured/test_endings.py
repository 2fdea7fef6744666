"""A completion at its token limit is completed if an ending fits, and reports the truncation."""

import json
import re
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.structured.constraint import GrammarVocabulary
from edgeinfer.structured.endings import MAX_ENDING
from edgeinfer.structured.grammars import Grammar, grammar, json_schema
from tests.edgeinfer.fake_engine import END, FakeEngine, byte_ids, model_on, seeded_logits

pytest.importorskip("llguidance")

PROMPT = [1, 5, 6]
INNER = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any": {},
    "texts": {"type": "array", "items": {"type": "string"}},
    "open": {"type": "object"},
    "required": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer", "minimum": 100}, "in": INNER},
        "required": ["a", "n", "in"],
    },
    "optional": {"type": "object", "properties": {"a": {"type": "array", "items": INNER}, "b": INNER}},
    "choices": {"type": "array", "minItems": 3, "items": {"enum": ["one", "two", None, 4]}},
    "lengths": {"type": "string", "minLength": 9, "maxLength": 40},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,}-[0-9]{3}$"},
    "tree": {"type": "object", "properties": {"next": {"$ref": "#"}, "x": {"type": "number"}}},
}


def eager(ids: list[int]) -> np.ndarray:
    """Never ends a text, and opens brackets where allowed."""
    logits = seeded_logits(ids)
    for letter in '"]}':
        logits[byte_ids(letter)[0]] -= 8
    for letter in "{[,":
        logits[byte_ids(letter)[0]] += 4
    return logits


def min_tokens(made: Grammar) -> int:
    """Tokens of the ending that is found before the first token."""
    model = model_on(FakeEngine(seeded_logits))
    vocabulary = GrammarVocabulary(model.tokenizer, model.engine.vocabulary_size)
    constraint = vocabulary.constraint(made)
    assert constraint.endings is not None
    ending = constraint.endings.after(constraint.matcher)
    assert ending is not None
    return len(ending)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.5, "top_k": 0, "seed": 1}])
def test_every_budget_with_room_for_an_ending_gives_valid_json(name: str, sampling: Any) -> None:
    low = min_tokens(json_schema(SCHEMAS[name]))
    shortened = 0
    for limit in (low, low + 1, low + 2, low + 5, low + 11, low + 30, low + 90):
        model = model_on(FakeEngine(eager, 4096))
        completion = model.generate(PROMPT, schema=SCHEMAS[name], max_tokens=limit, **sampling)
        json.loads(completion.text)
        assert len(completion.ids) <= limit
        shortened += completion.finish_reason == "length"
    assert shortened >= 2


def test_the_context_limit_also_completes_several_sequences() -> None:
    schema = SCHEMAS["required"]
    low = min_tokens(json_schema(schema))
    model = model_on(FakeEngine(eager, len(PROMPT) + low + 7))
    completion = model.generate(PROMPT, schema=schema, temperature=0.0)
    assert set(json.loads(completion.text)) == {"a", "n", "in"}
    assert completion.finish_reason == "context"
    for each in model_on(FakeEngine(eager, 512)).generate(
        PROMPT, n=3, schema=schema, max_tokens=low + 9, seed=1
    ):
        json.loads(each.text)
        assert each.finish_reason == "length"


def test_logprobs_do_not_change_the_ending() -> None:
    settings: Any = {"max_tokens": 40, "temperature": 0.0}
    schema = SCHEMAS["texts"]
    plain = model_on(FakeEngine(eager, 512)).generate(PROMPT, schema=schema, **settings)
    message = model_on(FakeEngine(eager, 512)).generate(PROMPT, schema=schema, logprobs=2, **settings)
    assert plain.ids == message.ids
    assert plain.finish_reason == message.finish_reason


def test_a_completion_within_the_limit_is_unchanged() -> None:
    schema = {**SCHEMAS["required"], "properties": {"a": {"enum": ["x"]}, "n": {"enum": [1]}, "in": INNER}}
    free = model_on(FakeEngine(seeded_logits, 4096)).generate(PROMPT, schema=schema, seed=2)
    assert free.finish_reason == "stop"
    limited = model_on(FakeEngine(seeded_logits, 4096)).generate(
        PROMPT, schema=schema, seed=2, max_tokens=len(free.ids) + MAX_ENDING
    )
    assert limited.ids == free.ids
    assert limited.finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('root ::= [a-z]+ "." ', r"[a-z]+\."),
        ('root ::= [A-Z]+ "end"', "[A-Z]+end"),
        ('root ::= "(" root ")" | "x"', r"\(*x\)*"),
        ('root ::= ("ab" | "cd")* "!"', "(ab|cd)*!"),
    ],
)
def test_grammars_are_completed_too(text: str, pattern: str) -> None:
    def opening(ids: list[int]) -> np.ndarray:
        logits = seeded_logits(ids)
        logits[[END, *(byte_ids(letter)[0] for letter in ".ex!")]] = -20
        return logits

    low = min_tokens(grammar(text))
    for limit in (low, low + 3, low + 20):
        completion = model_on(FakeEngine(opening, 512)).generate(
            PROMPT, grammar=text, max_tokens=limit, seed=1
        )
        assert re.fullmatch(pattern, completion.text), completion.text
        assert completion.finish_reason in ("length", "stop")


def test_too_few_tokens_for_any_ending_truncate_the_completion() -> None:
    schema = SCHEMAS["required"]
    completion = model_on(FakeEngine(eager, 512)).generate(PROMPT, schema=schema, max_tokens=5, seed=1)
    assert completion.finish_reason == "length"
    assert len(completion.ids) == 5


def test_a_bias_that_bans_the_ending_is_applied() -> None:
    banned = {byte_ids("]")[0]: -np.inf}
    completion = model_on(FakeEngine(eager, 512)).generate(
        PROMPT, schema=SCHEMAS["texts"], max_tokens=30, seed=1, logit_bias=banned
    )
    assert "]" not in completion.text
    assert completion.finish_reason == "length"


@pytest.mark.slow
def test_the_built_in_model_completes_its_json() -> None:
    with edgeinfer.load("tiny", device="cpu", draft=None) as model:
        for name, schema in SCHEMAS.items():
            for seed, limit in enumerate((60, 75, 100)):
                completion = model.generate("Once", schema=schema, max_tokens=limit, seed=seed)
                json.loads(completion.text)
                assert completion.finish_reason in ("length", "stop"), name
