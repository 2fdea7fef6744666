"""Parses tool calls in a model's output, in the formats of current chat templates.

A call is accepted only if its name is that of an offered tool; other text is left unchanged.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.chat_templates.call_arguments import (
    MISSING,
    json_types,
    json_value,
    python_value,
    typed_value,
)
from edgeinfer.chat_templates.reasoning import split_reasoning
from edgeinfer.errors import SettingError, shown

Tool = Mapping[str, Any]
"""As in OpenAI's API: {"type": "function", "function": {"name": …, "parameters": a schema}}, or its inner
object.
"""
ParsedCall = tuple[str, Any]
"""A tool name and its unchecked arguments."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedReply:
    """A parsed output: the text for the user, and the tool calls in order."""

    content: str
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str, tools: Sequence[Tool]) -> ParsedReply:
    """Parse an output; `text` contains special tokens, as `decode(ids, special=True)` returns them.

    Calls in the reasoning before the response are ignored.
    """
    schemas = {name: schema for name, schema in map(_named, tools) if name}
    reasoning, response = split_reasoning(text)
    for pattern, read in _FORMATS:
        calls: list[ToolCall] = []
        rest, end = [], 0
        for match in pattern.finditer(response):
            taken = list(_checked(read(match), schemas))
            if taken:
                calls += taken
                rest.append(response[end : match.start()])
                end = match.end()
        if calls:
            return ParsedReply(
                _MARKS.sub("", "".join([reasoning, *rest, response[end:]])).strip(), tuple(calls)
            )
    return ParsedReply(text, ())


def check_tools(tools: Sequence[Any]) -> None:
    """Raise `SettingError` for an invalid tool."""
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise SettingError(f"tools: saw {shown(tools)}, wanted a list of functions")
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise SettingError(f"tools[{index}]: saw {shown(tool)}, wanted a function")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise SettingError(f"tools[{index}]: saw the name {shown(name)}, wanted a text")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if not isinstance(parameters, Mapping | None) or not isinstance(properties, Mapping | None):
            raise SettingError(
                f"tools[{index}]: saw the parameters {shown(parameters)}, wanted a JSON schema"
            )


def _named(tool: Tool) -> tuple[str | None, Mapping[str, Any]]:
    function = tool.get("function", tool)
    return function.get("name"), function.get("parameters") or {}


def _arguments(given: Any, schema: Mapping[str, Any]) -> Any:
    """The arguments of a call as JSON types, or `MISSING`."""
    if isinstance(given, str):
        given = json_value(given)
    if isinstance(given, _Texts):
        properties = schema.get("properties") or {}
        given = {key: typed_value(value, properties.get(key)) for key, value in given.items()}
    try:
        return json_types(given)
    except (TypeError, ValueError, RecursionError):
        return MISSING


def _checked(calls: Iterator[ParsedCall], schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[ToolCall]:
    for name, arguments in calls:
        schema = schemas.get(name)
        if schema is None:
            continue
        taken = _arguments(arguments, schema)
        if isinstance(taken, dict):
            yield ToolCall(name, taken)


class _Texts(dict[str, str]):
    """Arguments given as strings; their types are defined by the schema."""


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
            name = inner.get("name", function)
            yield str(name), inner.get("arguments", inner.get("parameters"))


def _json_inside(match: re.Match[str]) -> Iterator[ParsedCall]:
    return _from_json(match["json"].strip())


def _named_json(match: re.Match[str]) -> Iterator[ParsedCall]:
    yield match["name"].strip(), match["json"].strip()


def _parameters(pattern: str) -> Callable[[re.Match[str]], Iterator[ParsedCall]]:
    """Parser for arguments given as text between marks."""
    each = re.compile(pattern, re.DOTALL)

    def read(match: re.Match[str]) -> Iterator[ParsedCall]:
        yield (
            match["name"].strip(),
            _Texts((m["key"], m["value"]) for m in each.finditer(match["rest"] or "")),
        )

    return read


def _python_calls(match: re.Match[str]) -> Iterator[ParsedCall]:
    """`[name(key="value"), …]`, constants only; or the calls as JSON."""
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


_Read = Callable[[re.Match[str]], Iterator[ParsedCall]]
_NAME = r"(?P<name>[\w.\-]+)"
_JSON_TO = r"(?P<json>.*?)"
_TOOL_CALL_END = r"</(?:seed:)?tool_call>"
_PARAMETER = (
    r"<parameter=[\w.\-]+>[^<]*+"
    rf"(?:<(?!/parameter>\s*(?:<parameter=|</function>|{_TOOL_CALL_END}))[^<]*+)*+</parameter>"
)
"""A parameter's value ends at the mark before the next parameter or before the end of the call."""
_FORMATS: tuple[tuple[re.Pattern[str], _Read], ...] = tuple(
    (re.compile(pattern, re.DOTALL), read)
    for pattern, read in (
        # Qwen 3 Coder, Qwen 3.5, Nemotron 3, Seed-OSS
        (
            rf"(?:<(?:seed:)?tool_call>\s*)?<function={_NAME}>(?P<rest>\s*+(?:{_PARAMETER}\s*+)*+)"
            rf"(?:</function>(?:\s*{_TOOL_CALL_END})?|{_TOOL_CALL_END})",
            _parameters(
                r"<parameter=(?P<key>[\w.\-]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"
            ),
        ),
        # GLM 4
        (
            rf"<tool_call>\s*{_NAME}\s*(?P<rest><arg_key>.*?)?</tool_call>",
            _parameters(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ),
        # Hermes, Qwen, SmolLM, Granite 4, Falcon-H1
        (rf"<tool_call>{_JSON_TO}(?:</tool_call>|$)", _json_inside),
        # DeepSeek R1, V3, V3.1
        (
            rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>|\s*```json)"
            rf"{_JSON_TO}(?:\s*```\s*)?(?:<｜tool▁call▁end｜>|$)",
            _named_json,
        ),
        # gpt-oss
        (
            rf"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.{_NAME}[^{{]*<\|message\|>"
            rf"{_JSON_TO}(?:<\|call\|>|$)",
            _named_json,
        ),
        # Kimi K2
        (
            rf"<\|tool_call_begin\|>\s*functions\.{_NAME}:\d+\s*<\|tool_call_argument_begin\|>"
            rf"{_JSON_TO}(?:<\|tool_call_end\|>|$)",
            _named_json,
        ),
        # Jamba
        (rf"<tool_calls>{_JSON_TO}(?:</tool_calls>|$)", _json_inside),
        # LFM 2
        (r"<\|tool_call_start\|>(?P<python>.*?)(?:<\|tool_call_end\|>|$)", _python_calls),
        # Mistral, older and newer formats
        (rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[ARGS\])?{_JSON_TO}(?:(?=\[TOOL_CALLS\])|</s>|$)", _named_json),
        (rf"\[TOOL_CALLS\]{_JSON_TO}(?:</s>|$)", _json_inside),
        # Granite 3
        (rf"<\|tool_call\|>{_JSON_TO}(?:<\|end_of_text\|>|$)", _json_inside),
        # Llama 3: only the call
        (r"^\s*(?:<\|python_tag\|>)?\s*(?P<json>[\[{].*?)\s*(?:<\|e\w+_id\|>\s*)*$", _json_inside),
    )
)
_MARKS = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|<\|tool_calls_section_(?:begin|end)\|>")
