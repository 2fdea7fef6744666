"""Parses tool calls in a model's output, in the formats of current chat templates.

A call is accepted only if its name is that of an offered tool; other text is left unchanged.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.chat_templates.call_arguments import MISSING, json_types, json_value, typed_value
from edgeinfer.chat_templates.call_formats import CALL_FORMATS, CALL_MARKS, WRAPPERS, CallFormat
from edgeinfer.chat_templates.reasoning import split_reasoning
from edgeinfer.errors import SettingError, shown

Tool = Mapping[str, Any]
"""As in OpenAI's API: {"type": "function", "function": {"name": …, "parameters": a schema}}, or its inner
object.
"""
Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments."""
_NAME = re.compile(r"[\w.\-]{1,64}")


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
    return _parsed(text, CALL_FORMATS, schemas_of(tools))


def written_calls(text: str) -> ParsedReply:
    """As `parse_tool_calls`, where the offered tools aren't known: every call after a mark of its format, of
    any name. Marks in Markdown's code are text.
    """
    response = split_reasoning(text)[1]
    forms = [form for form in CALL_FORMATS if call_start(response, form.marks) is not None]
    return _parsed(text, forms, None)


def call_start(text: str, marks: Sequence[str] = CALL_MARKS) -> int | None:
    """Where the first of the marks begins that isn't in Markdown's code; None: there is none."""
    starts = [match.start() for mark in marks for match in re.finditer(re.escape(mark), text)]
    return min((at for at in starts if not _is_in_code(text[:at])), default=None)


def _is_in_code(before: str) -> bool:
    """Whether the text before leaves a fence or a code span of its last line open."""
    return before.count("```") % 2 == 1 or before.rpartition("\n")[2].count("`") % 2 == 1


def _parsed(text: str, forms: Sequence[CallFormat], schemas: Schemas | None) -> ParsedReply:
    """The calls in the first format that has one; `schemas`: those of the offered tools, None: any tool."""
    reasoning, response = split_reasoning(text)
    for form in forms:
        calls: list[ToolCall] = []
        rest, end = [], 0
        for match in form.pattern.finditer(response):
            if schemas is None and _is_in_code(response[: match.start()]):
                continue
            taken = list(calls_of_match(form, match, schemas))
            if taken:
                calls += taken
                rest.append(response[end : match.start()])
                end = match.end()
        if calls:
            content = WRAPPERS.sub("", "".join([reasoning, *rest, response[end:]])).strip()
            return ParsedReply(content, tuple(calls))
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


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the tools' parameters, by name."""
    return {name: schema for name, schema in map(_named, tools) if name}


def _named(tool: Tool) -> tuple[str | None, Mapping[str, Any]]:
    function = tool.get("function", tool)
    return function.get("name"), function.get("parameters") or {}


def _arguments(given: Any, schema: Mapping[str, Any]) -> Any:
    """The arguments of a call as JSON types, or `MISSING`."""
    if isinstance(given, str):
        given = json_value(given)
    try:
        return json_types(typed_value(given, schema) if isinstance(given, dict) else given)
    except (TypeError, ValueError, RecursionError):
        return MISSING


def calls_of_match(form: CallFormat, match: re.Match[str], schemas: Schemas | None) -> Iterator[ToolCall]:
    """The calls in a match of a format's pattern. `schemas`: those of the offered tools, None: any tool."""
    for name, arguments in form.read(match):
        schema = ({} if _NAME.fullmatch(name) else None) if schemas is None else schemas.get(name)
        if schema is None:
            continue
        taken = _arguments(arguments, schema)
        if isinstance(taken, dict):
            yield ToolCall(name, taken)
