"""Chats and messages of the store as JSON, and the text under which a response is stored."""

import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.chat_templates.reasoning import parted
from edgeinfer.chat_templates.tool_calls import written_calls
from edgeinfer.errors import shown
from edgeinfer.history.records import SearchHit, StoredChat, StoredMessage, written_part
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
    return "\n".join([opening + content, *map(_call_text, calls)])


def _call_text(call: Any) -> str:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise RequestError(f"calls: saw {shown(call)}, wanted objects with name and arguments", param="calls")
    check_inner_fields(call, "calls", ("name", "arguments"))
    arguments = call.get("arguments")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"calls: saw arguments {shown(arguments)}, wanted an object", param="calls")
    inner = json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"
