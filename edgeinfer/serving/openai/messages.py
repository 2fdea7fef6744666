"""Validates the messages of a chat request; the text of each is joined."""

import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.fields import RequestError, check_inner_fields, checked_list

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CALLS = 256

_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_WITHOUT_EFFECT = ("refusal", "annotations", "audio", "function_call", "parsed")
"""Fields that clients send back unchanged, usually empty."""


def checked_messages(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages, and warnings about fields without an effect. Raises `RequestError`."""
    if not isinstance(value, list):
        raise RequestError(f"messages: wanted list, saw {type(value).__name__}", param="messages")
    if not value:
        raise RequestError("messages: saw none, wanted at least one", param="messages")
    given = checked_list(value, "messages", MAX_MESSAGES, "a list of messages")
    warnings: list[str] = []
    return [
        _message(message, f"messages[{index}]", warnings) for index, message in enumerate(given)
    ], warnings


def _message(message: Any, name: str, warnings: list[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name}: wanted an object with a role, saw {shown(message)}", param="messages")
    warnings += check_inner_fields(message, name, (*_FIELDS, *_REASONING), _WITHOUT_EFFECT)
    values = {
        key: value for key, value in message.items() if key not in _WITHOUT_EFFECT and value is not None
    }
    for key in ("name", "tool_call_id", *_REASONING):
        if not isinstance(values.get(key, ""), str):
            raise RequestError(f"{name}.{key}: saw {shown(values[key])}, wanted a text", param="messages")
    values["content"] = _content(message.get("content"), name)
    if "tool_calls" in values:
        calls = checked_list(values["tool_calls"], f"{name}.tool_calls", MAX_CALLS, "a list of calls")
        values["tool_calls"] = [_tool_call(call, f"{name}.tool_calls") for call in calls]
        if not calls:
            del values["tool_calls"]
    if values["role"] == "developer":
        values["role"] = "system"
    return values


def _content(content: Any, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        parts = checked_list(content, f"{name}.content", MAX_PARTS, "a text")
        return "".join(_text_part(part, name) for part in parts)
    if not isinstance(content, str):
        raise RequestError(f"{name}.content: saw {shown(content)}, wanted a text", param="messages")
    return content


def _text_part(part: Any, name: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"{name}.content: saw a part of type {shown(kind)}, only text is supported", param="messages"
    )


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    """Parse the arguments: clients send them as text, templates expect an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{name}: saw {shown(call)}, wanted calls of functions by name", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"{name}: saw arguments {shown(function.get('arguments'))}, wanted a JSON object",
            param="messages",
        )
    return {**call, "function": {**function, "arguments": arguments}}
