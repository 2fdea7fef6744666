"""Messages of chats in the form of OpenAI's API, and its responses as completions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.chat_templates.reasoning import without_reasoning
from edgeinfer.chat_templates.tool_calls import ToolCall
from edgeinfer.results import FinishReason, Generation

Message = Mapping[str, Any]
OPENING, CLOSING = "<think>\n", "\n</think>\n\n"
"""Marks around the reasoning, as models write them: a completion is one text."""


@dataclass(frozen=True)
class RemoteCompletion(Generation):
    """A completion of a server, which has no token ids. `calls`: those of the offered tools."""

    calls: tuple[ToolCall, ...] = ()

    @property
    def context_tokens(self) -> int:
        return self.speed.prompt_tokens + self.speed.generated_tokens


def sent_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with an id for each call and its result, without the reasoning of earlier responses."""
    sent: list[dict[str, Any]] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        fields = {name: value for name, value in message.items() if name != "reasoning_content"}
        if message["role"] == "assistant":
            fields["content"] = without_reasoning(str(message.get("content") or ""))
            if calls := message.get("tool_calls"):
                fields["tool_calls"] = [_call(call, f"call_{index}_{n}") for n, call in enumerate(calls)]
                waiting = [call["id"] for call in fields["tool_calls"]]
        elif message["role"] == "tool" and "tool_call_id" not in message:
            fields["tool_call_id"] = waiting.pop(0) if waiting else f"call_{index}"
            fields.pop("name", None)
        sent.append(fields)
    return sent


def _call(call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id", call_id),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a whole message, with its reasoning between marks."""
    reasoning, content = reasoning_in(message), message.get("content")
    text = content if isinstance(content, str) else ""
    return f"{OPENING}{reasoning}{CLOSING}{text}" if reasoning else text


def reasoning_in(message: Mapping[str, Any]) -> str:
    """The reasoning of a message or of a delta; servers have two names for it."""
    value = message.get("reasoning_content") or message.get("reasoning")
    return value if isinstance(value, str) else ""


class CallParts:
    """Collects tool calls that arrive in parts."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[list[str], list[str]]] = {}

    def add(self, deltas: object) -> None:
        """Take the `tool_calls` of a delta or of a message."""
        for position, delta in enumerate(deltas if isinstance(deltas, list) else ()):
            function = delta.get("function") if isinstance(delta, dict) else None
            if not isinstance(function, dict):
                continue
            index = delta.get("index")
            names, arguments = self._parts.setdefault(index if isinstance(index, int) else position, ([], []))
            for into, value in ((names, function.get("name")), (arguments, function.get("arguments"))):
                if isinstance(value, str):
                    into.append(value)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far whose arguments are whole, in their order."""
        found = []
        for _, (names, arguments) in sorted(self._parts.items()):
            values = _arguments("".join(arguments))
            if names and values is not None:
                found.append(ToolCall("".join(names), values))
        return tuple(found)


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def finish_of(reason: object, has_limit: bool) -> FinishReason:
    """The library's reason. `has_limit`: the request limits the tokens, so "length" is this limit."""
    if reason == "length":
        return "length" if has_limit else "context"
    return "stop"
