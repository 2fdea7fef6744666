"""The default of `additionalProperties`: objects with `properties` allow no others, as in llama.cpp.

A schema that composes others (`allOf`, `$ref` with other keywords, …) is closed as a whole: its parts stay
open, because a closed part would forbid the properties of the others.
"""

from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import SettingError

MAX_DEPTH = 64
"""Maximum levels of nested schemas and lists. llguidance reads 128 of JSON."""

_UNIONS = ("anyOf", "oneOf")
_ANSWERED = ("additionalProperties", "unevaluatedProperties")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)


def with_closed_objects(schema: Any) -> Any:
    """A copy of a schema where `additionalProperties` is false if `properties` leaves it open.

    Raises:
        SettingError: more than `MAX_DEPTH` levels.
    """
    _check_depth(schema)
    return _SchemaCloser(schema).whole() if isinstance(schema, Mapping) else schema


def _check_depth(schema: Any) -> None:
    level, values = 0, [schema]
    while values:
        level += 1
        if level > 2 * MAX_DEPTH:
            raise SettingError(
                f"schema: saw more than {MAX_DEPTH} levels of nesting, wanted {MAX_DEPTH} at most"
            )
        values = [
            inner
            for value in values
            for inner in (
                value.values()
                if isinstance(value, Mapping)
                else value
                if isinstance(value, list | tuple)
                else ()
            )
            if isinstance(inner, Mapping | list | tuple)
        ]


class _SchemaCloser:
    """Traverses one schema. `_open`: copies of referenced parts; `_names`: their names, by reference."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._open: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def whole(self) -> dict[str, Any]:
        """The root schema, with the copies in its definitions."""
        schema = self._closed(self._root)
        if self._open:
            known = schema.get("$defs", {})
            schema["$defs"] = {**known, **self._open}
        return dict(schema)

    def _closed(self, schema: Any) -> Any:
        """A schema for a whole value."""
        if not isinstance(schema, Mapping):
            return schema
        if not _composes(schema):
            copy = self._walked(schema, self._closed)
            if "properties" in schema and not any(name in schema for name in _ANSWERED):
                copy["additionalProperties"] = False
            return copy
        names, patterns, answered = _PropertyList(self._root).of(schema)
        copy = self._walked(schema, self._opened)
        if answered or not names | patterns:
            return copy
        for keyword, listed in (("properties", names), ("patternProperties", patterns)):
            if listed:
                own = copy.get(keyword, {})
                copy[keyword] = {**own, **{name: True for name in sorted(listed) if name not in own}}
        copy["additionalProperties"] = False
        return copy

    def _opened(self, schema: Any) -> Any:
        """A schema that is a part of another: its property list is incomplete."""
        return self._walked(schema, self._opened) if isinstance(schema, Mapping) else schema

    def _walked(self, schema: Mapping[str, Any], part: Any) -> dict[str, Any]:
        """A copy; `part` handles subschemas for the same value, `_closed` those for values inside it."""
        copy = dict(schema)
        if part == self._opened and isinstance(schema.get("$ref"), str):
            copy["$ref"] = self._open_copy(schema["$ref"])
        for keyword in _NAMED:
            if isinstance(schema.get(keyword), Mapping):
                copy[keyword] = {name: self._closed(inner) for name, inner in schema[keyword].items()}
        for keyword in _SINGLE:
            if isinstance(schema.get(keyword), Mapping):
                copy[keyword] = self._closed(schema[keyword])
        for keyword in _LISTS:
            if isinstance(schema.get(keyword), list):
                each = part if keyword in ("allOf", *_UNIONS) else self._closed
                copy[keyword] = [each(inner) for inner in schema[keyword]]
        return copy

    def _open_copy(self, ref: str) -> str:
        target = resolved(self._root, ref)
        if not isinstance(target, Mapping):
            return ref
        if ref not in self._names:
            name = self._names[ref] = f"edgeinfer-open-{len(self._names)}"  # first: it may refer to itself
            self._open[name] = self._opened(target)
        return f"#/$defs/{self._names[ref]}"


class _PropertyList:
    """The properties that a schema and its parts list, and whether any part restricts additional ones."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen: set[str] = set()

    def of(self, schema: Any) -> tuple[set[str], set[str], bool]:
        """Property names, patterns, and whether additional properties are restricted."""
        if not isinstance(schema, Mapping):
            return set(), set(), False
        names, patterns = (
            set(schema[keyword]) if isinstance(schema.get(keyword), Mapping) else set()
            for keyword in ("properties", "patternProperties")
        )
        answered = any(name in schema for name in _ANSWERED)
        parts = [part for keyword in ("allOf", *_UNIONS) for part in _listed(schema.get(keyword))]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in self._seen:
            self._seen.add(ref)
            target = resolved(self._root, ref)
            answered = answered or not isinstance(target, Mapping)
            parts.append(target)
        for part in parts:
            more, more_patterns, spoken = self.of(part)
            names, patterns, answered = names | more, patterns | more_patterns, answered or spoken
        return names, patterns, answered


def _composes(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas apply to the same value."""
    parts = [name for name in ("properties", "patternProperties", "$ref", *_UNIONS) if name in schema]
    return "allOf" in schema or len(set(parts) - {"patternProperties"}) > 1


def resolved(root: Mapping[str, Any], ref: str) -> Any:
    """The target of a reference into the same schema; None: not found."""
    if not ref.startswith("#") or (len(ref) > 1 and ref[1] != "/"):
        return None
    target: Any = root
    for step in ref[2:].split("/") if len(ref) > 1 else ():
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(key)
        elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
