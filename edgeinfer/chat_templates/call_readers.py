"""Readers of tool calls: each returns the calls in a match of its format's pattern."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from edgeinfer.chat_templates.call_arguments import MISSING, PlainText, json_value, python_value

ParsedCall = tuple[str, Any]
"""A tool name and its unchecked arguments."""
Reader = Callable[[re.Match[str]], Iterator[ParsedCall]]
GEMMA_QUOTE = '<|"|>'
MINIMAX_TAG = "]<]minimax[>["
"""MiniMax M3 writes this before each of its tags."""

_GEMMA_KEY = re.compile(r"([{,]\s*)([\w.\-]+)\s*:")
_GEMMA_NONE = re.compile(r"\bNone\b")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


def json_calls(match: re.Match[str]) -> Iterator[ParsedCall]:
    """Group "json": calls as objects with a name and arguments."""
    return _from_json(match["json"].strip())


def json_by_name(match: re.Match[str]) -> Iterator[ParsedCall]:
    """Group "json": objects whose key is the name, and its value the arguments."""
    value = json_value(match["json"].strip())
    for call in value if isinstance(value, list) else [value]:
        if isinstance(call, dict):
            yield from call.items()


def named_json(match: re.Match[str]) -> Iterator[ParsedCall]:
    """Group "name", and group "json" with the arguments."""
    yield match["name"].strip(), match["json"].strip()


def gemma_call(match: re.Match[str]) -> Iterator[ParsedCall]:
    """Group "name", and group "rest": JSON with bare keys and strings between `GEMMA_QUOTE`."""
    parts = match["rest"].split(GEMMA_QUOTE)
    parts[1::2] = [json.dumps(text) for text in parts[1::2]]
    parts[::2] = [_GEMMA_NONE.sub("null", _GEMMA_KEY.sub(r'\1"\2":', part)) for part in parts[::2]]
    yield match["name"], "".join(parts)


def text_parameters(pattern: str) -> Reader:
    """Reader of group "name" and of the arguments in group "rest": matches of `pattern` with a "key" and a
    "value"; the group "type" may name it a string.
    """
    each = re.compile(pattern, re.DOTALL)

    def read(match: re.Match[str]) -> Iterator[ParsedCall]:
        arguments = {found["key"]: _parameter(found) for found in each.finditer(match["rest"] or "")}
        yield match["name"].strip(), arguments

    return read


def _parameter(found: re.Match[str]) -> Any:
    value, kind = found["value"], found.groupdict().get("type")
    cdata = _CDATA.fullmatch(value)
    if cdata is not None:
        value = cdata[1]
    elif value.startswith("\n"):
        value = value[1:].removesuffix("\n")
    return str(value) if kind in ("string", "true") else PlainText(value)


def minimax_call(match: re.Match[str]) -> Iterator[ParsedCall]:
    """Group "name", and group "rest": nested elements, `<item>` for those of lists."""
    stack: list[tuple[str, str, list[tuple[str, Any]]]] = [("", "", [])]
    for piece in match["rest"].split(MINIMAX_TAG)[1:]:
        tag, _, text = piece.removeprefix("<").partition(">")
        if not tag.startswith("/"):
            stack.append((tag, text, []))
        elif len(stack) > 1 and tag[1:] == stack[-1][0]:
            name, text, inner = stack.pop()
            stack[-1][2].append((name, _element(inner) if inner else PlainText(text)))
        else:
            return
    if len(stack) == 1:
        yield match["name"], dict(stack[0][2])


def _element(inner: list[tuple[str, Any]]) -> Any:
    return [value for _, value in inner] if all(name == "item" for name, _ in inner) else dict(inner)


def python_calls(match: re.Match[str]) -> Iterator[ParsedCall]:
    """Group "python": `[name(key="value"), …]`, constants only; or the calls as JSON."""
    text = match["python"].strip()
    # Templates write strings without escaping, so a newline may be inside of quotes.
    parsed = _python_list(text) or _python_list(text.replace("\n", "\\n"))
    if not parsed:
        yield from _from_json(text)
    for call in parsed:
        if isinstance(call, ast.Call) and not call.args and all(each.arg for each in call.keywords):
            values = {str(each.arg): python_value(each.value) for each in call.keywords}
            if MISSING not in values.values():
                yield _dotted_name(call.func), values


def _from_json(text: str) -> Iterator[ParsedCall]:
    """The calls of one JSON object, of a list of them, or of several consecutive objects; or of a Python
    literal of the same format.
    """
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield from _of_objects(python_value(text) if at == 0 else None)
            return
        yield from _of_objects(value)
        at += len(text[at:]) - len(text[at:].lstrip(" \n\t;,"))


def _of_objects(value: Any) -> Iterator[ParsedCall]:
    """The calls of an object or of a list of objects: a name with "arguments" or "parameters"."""
    for call in value if isinstance(value, list) else [value]:
        if isinstance(call, dict):
            function = call.get("function")
            inner = function if isinstance(function, dict) else call
            name = inner.get("name", inner.get("tool_name", function))
            yield str(name), inner.get("arguments", inner.get("parameters"))


def _dotted_name(function: ast.expr) -> str:
    """A function's name, as `Calendar.create_event`; "" for other expressions."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    return ".".join([function.id, *parts]) if isinstance(function, ast.Name) else ""


def _python_list(text: str) -> list[ast.expr]:
    """The calls in a Python list, or a single one."""
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
    return calls if all(isinstance(call, ast.Call) for call in calls) else []
