"""Values of a tool call's arguments: JSON, Python literals, and plain strings typed by the tool's schema."""

import ast
import json
from collections.abc import Mapping
from typing import Any

MISSING: Any = object()
"""What the parsers return for invalid text."""
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_FAILURES = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


class PlainText(str):
    """An argument that the model wrote as a string without quotes; the schema defines its type."""


def json_value(text: str) -> Any:
    """The value of a JSON text without NaN and infinities; `MISSING` for other text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except _FAILURES:
        return MISSING


def python_value(source: str | ast.expr) -> Any:
    """The value of a Python literal as JSON types; `true`, `false` and `null` are valid too. `MISSING` for
    other text.
    """
    try:
        parsed = ast.parse(source.strip(), mode="eval").body if isinstance(source, str) else source
        return json_types(ast.literal_eval(_JsonWords().visit(parsed)))
    except _FAILURES:
        return MISSING


def json_types(value: Any) -> Any:
    """A copy of JSON types only: tuples are lists, keys and lone surrogates are valid text.

    Raises:
        ValueError, TypeError: a value that JSON can't represent.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.loads(text.encode("utf-8", "replace"))


def typed_value(value: Any, schema: Any) -> Any:
    """The value with each `PlainText` in it converted to a type that its schema allows.

    Text that has none of the allowed types is returned unchanged.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, dict):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        return {key: typed_value(each, properties.get(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [typed_value(each, schema.get("items")) for each in value]
    return _typed_text(value, _kinds(schema)) if isinstance(value, PlainText) else value


def _typed_text(text: str, kinds: set[str]) -> Any:
    if kinds == {"string"}:
        return text
    value = _parsed(text, kinds)
    if value is MISSING:
        return text
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return text if "string" in kinds and _kind(value) not in kinds - {"string"} else value


def _parsed(text: str, kinds: set[str]) -> Any:
    value = json_value(text)
    if value is not MISSING:
        return value
    word = text.strip()
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    return python_value(word) if kinds & {"object", "array"} and word[:1] in ("[", "{", "(") else MISSING


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names; empty: any."""
    kind = schema.get("type")
    if isinstance(kind, str | list):
        kinds = {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)}
    else:
        choices = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        parts = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
        kinds = {_kind(choice) for choice in choices}
        kinds |= {kind for part in parts if isinstance(part, Mapping) for kind in _kinds(part)}
    return kinds | {"integer"} if "number" in kinds else kinds


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


class _JsonWords(ast.NodeTransformer):
    """Replaces `true`, `false` and `null` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node
