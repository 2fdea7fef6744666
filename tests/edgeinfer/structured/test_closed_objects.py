"""Objects that list their properties hold no others unless the schema allows it; composed ones as a whole."""

import json
from typing import Any

import pytest

from edgeinfer.structured.closed_objects import with_closed_objects
from edgeinfer.structured.compile_child import byte_tokens
from edgeinfer.structured.grammars import json_schema

pytest.importorskip("llguidance")

A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
DEFS = {"A": A, "B": B}


def accepts(schema: Any, value: Any) -> bool:
    import llguidance

    matcher = llguidance.LLMatcher(byte_tokens(), json_schema(schema).compiled)
    tokens = [*json.dumps(value).encode(), 256]
    return bool(matcher.validate_tokens(tokens) == len(tokens))


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "z": 2}]),
        ({**A, "additionalProperties": True}, [{"a": 1, "z": 2}], [{"a": "x"}]),
        ({"type": "object"}, [{"z": {"y": 1}}], [[]]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"z": 1}]]),
        ({"type": "object", "properties": {"in": A}}, [{"in": {"a": 1}}], [{"in": {"z": 1}}]),
        ({"$defs": DEFS, "$ref": "#/$defs/A"}, [{"a": 1}], [{"z": 1}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"z": 1}]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1, "z": 2}]),
        (
            {"$defs": DEFS, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            [{"a": 1, "b": 2}],
            [{"z": 1}],
        ),
        (
            {"$defs": DEFS, "$ref": "#/$defs/A", "properties": {"c": {"$ref": "#/$defs/A"}}},
            [{"a": 1, "c": {"a": 1}}],
            [{"c": {"z": 1}}, {"z": 1}],
        ),
        ({"$defs": DEFS, "allOf": [{"$ref": "#/$defs/A"}]}, [{"a": 1}], [{"b": 1}]),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, [{"a": 1, "b": 2, "z": 3}], []),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "properties": {"a": A}},
            [{"a": {"a": 1}, "x1": 2}],
            [{"z": 1}],
        ),
    ],
)
def test_only_listed_properties_are_allowed(schema: Any, yes: list[Any], no: list[Any]) -> None:
    assert [accepts(schema, value) for value in yes] == [True] * len(yes)
    assert [accepts(schema, value) for value in no] == [False] * len(no)


def test_a_recursive_schema_is_closed_too() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert accepts(tree, {"next": {"next": {}}})
    assert not accepts(tree, {"next": {"z": {}}})
    composed: dict[str, Any] = {
        "$defs": {"T": {"allOf": [A, {"properties": {"next": {"$ref": "#/$defs/T"}}}]}}
    }
    composed |= {"$ref": "#/$defs/T"}
    assert accepts(composed, {"a": 1, "next": {"a": 2}})
    assert not accepts(composed, {"next": {"z": 2}})


def test_the_schema_of_the_caller_is_not_modified() -> None:
    schema: dict[str, Any] = {
        "properties": {"a": {"const": {"properties": {}}}},
        "enum": [{"properties": {"x": {}}}],
    }
    before = json.dumps(schema)
    closed = with_closed_objects(schema)
    assert json.dumps(schema) == before
    assert closed == {**schema, "additionalProperties": False}
    assert with_closed_objects(True) is True


@pytest.mark.parametrize(
    "ref", ["#nowhere", "#/nowhere", "https://example.com/x", "#/$defs/A/0", "#/$defs/~2"]
)
def test_an_unresolved_reference_is_left_to_the_compiler(ref: str) -> None:
    schema = {"$defs": DEFS, "allOf": [{"$ref": ref}, A]}
    assert with_closed_objects(schema)["allOf"][0] == {"$ref": ref}
