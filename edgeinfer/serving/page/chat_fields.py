"""Chats and messages of the store as JSON, and the text under which a response is stored."""

from collections.abc import Mapping
from typing import Any

from edgeinfer.chat_templates.reasoning import parted
from edgeinfer.chat_templates.tool_calls import ToolCall, written_calls
from edgeinfer.errors import shown
from edgeinfer.history.records import SearchHit, StoredChat, StoredMessage, written_part
from edgeinfer.history.tool_messages import results_of, text_of_results, text_with_calls
from edgeinfer.serving.fields import RequestError, check_inner_fields, checked_list, checked_text

MAX_CALLS = 128
Fields = dict[str, Any]


def chat_fields(chat: StoredChat) -> Fields:
    """A chat without its messages."""
    return {
        "id": chat.id,
        "label": chat.label,
        "name": chat.name,
        "title": chat.title,
        "model": chat.model,
        "system": chat.system,
        "created": chat.created,
        "changed": chat.changed,
        "tip": chat.tip,
        "messages": chat.messages,
    }


def hit_fields(hit: SearchHit) -> Fields:
    """A chat with the excerpt of a message that a search found."""
    return {**chat_fields(hit.chat), "found": hit.message.id, "excerpt": hit.excerpt}


def message_fields(message: StoredMessage) -> Fields:
    """A message; a response is split into reasoning, content and tool calls. `written`: what the user typed,
    without attached files.
    """
    common: Fields = {
        "id": message.id,
        "parent": message.parent,
        "role": message.role,
        "state": message.state,
        "created": message.created,
    }
    if message.role == "tool":
        results = [{"name": name, "content": content} for name, content in results_of(message.text)]
        return {**common, "content": "", "results": results}
    if message.role != "assistant":
        return {**common, "content": message.text, "written": written_part(message.text)}
    reply = parted(message.text)
    called = written_calls(reply.response)
    calls = [{"name": call.name, "arguments": call.arguments} for call in called.calls]
    return {**common, "reasoning": reply.reasoning, "content": called.content, "calls": calls}


def response_text(body: Mapping[str, Any]) -> str:
    """The text of a response from its reasoning, content and calls, with the marks that all models' responses
    in the store may have.
    """
    reasoning, content = checked_text(body, "reasoning"), checked_text(body, "content")
    opening = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    calls = checked_list(body.get("calls"), "calls", MAX_CALLS, "a list of calls")
    return text_with_calls(opening + content, map(_call, calls))


def _call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise RequestError(f"calls: saw {shown(call)}, wanted objects with name and arguments", param="calls")
    check_inner_fields(call, "calls", ("name", "arguments"))
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        raise RequestError(f"calls: saw arguments {shown(arguments)}, wanted an object", param="calls")
    return ToolCall(call["name"], arguments)


def results_text(body: Mapping[str, Any]) -> str:
    """The text of a message of the role "tool" from its results."""
    given = checked_list(body.get("results"), "results", MAX_CALLS, "a list of results")
    if not given:
        raise RequestError("results: saw none, wanted one for each call", param="results")
    for one in given:
        texts = isinstance(one, Mapping) and [one.get(name) for name in ("name", "content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RequestError(
                f"results: saw {shown(one)}, wanted objects with name and content", param="results"
            )
    return text_of_results([(one["name"], one["content"]) for one in given])
