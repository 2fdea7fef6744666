"""Tool calls and their results as texts of the chat store, and as the messages that a model reads."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from edgeinfer.chat_templates.reasoning import split_reasoning
from edgeinfer.chat_templates.tool_calls import ToolCall, written_calls

Results = Sequence[tuple[str, str]]
"""Name of a tool, text of its result."""


def text_with_calls(content: str, calls: Iterable[ToolCall]) -> str:
    """A response with its calls in one format, whatever the model's was: JSON between marks."""
    return "\n".join([content, *(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)])


def _json(call: ToolCall) -> str:
    """A call as JSON in which no mark can begin."""
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return text.replace("<", "\\u003c")


def text_of_results(results: Results) -> str:
    """The results as the text of a message of the role "tool"."""
    values = [{"name": name, "content": content} for name, content in results]
    return json.dumps(values, ensure_ascii=False)


def results_of(text: str) -> list[tuple[str, str]]:
    """The results in a message of the role "tool"; those of a damaged store may be missing."""
    try:
        values = json.loads(text)
    except ValueError:
        return []
    pairs = values if isinstance(values, list) else []
    return [
        (str(pair.get("name", "")), str(pair.get("content", ""))) for pair in pairs if isinstance(pair, dict)
    ]


def calls_only(text: str) -> bool:
    """Whether a response has calls, and nothing else besides its reasoning."""
    reply = written_calls(text)
    return bool(reply.calls) and not split_reasoning(reply.content)[1].strip()


def chat_messages(role: str, text: str, has_results: bool) -> list[dict[str, Any]]:
    """A stored message as chat messages. `has_results`: results of its calls follow."""
    if role == "tool":
        return [{"role": "tool", "name": name, "content": content} for name, content in results_of(text)]
    if role != "assistant":
        return [{"role": role, "content": text}]
    reply = written_calls(text)
    if not (has_results and reply.calls):
        return [{"role": role, "content": text}]
    functions = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
    calls = [{"type": "function", "function": function} for function in functions]
    return [{"role": role, "content": reply.content, "tool_calls": calls}]
