"""Exports a chat: Markdown for reading, JSON lines for programs."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from edgeinfer.chat_templates.reasoning import parted
from edgeinfer.history.records import StoredChat, StoredMessage
from edgeinfer.history.tool_messages import results_of

SPEAKERS = {"user": "You", "assistant": "Model", "tool": "Results of tools"}


def as_markdown(chat: StoredChat, messages: Sequence[StoredMessage]) -> str:
    """The messages of one branch, each under a heading; reasoning is quoted. Incomplete messages are marked
    with their state.
    """
    lines = [f"# {chat.title or chat.label}", "", f"{chat.model}, {_day(chat.created)}", ""]
    if chat.system:
        lines += ["## System", "", chat.system, ""]
    for message in messages:
        ending = (
            ""
            if message.state == "whole"
            else " (cut off)"
            if message.state == "coming"
            else f" ({message.state})"
        )
        lines += [f"## {SPEAKERS[message.role]}{ending}", "", _message_text(message), ""]
    return "\n".join(lines)


def _message_text(message: StoredMessage) -> str:
    """A message's text with the reasoning before it quoted."""
    if message.role == "tool":
        return "\n\n".join(f"{name}:\n\n{content}" for name, content in results_of(message.text))
    reply = parted(message.text)
    if message.role != "assistant" or not reply.reasoning:
        return message.text.strip()
    quoted = "\n".join(f"> {line}".rstrip() for line in reply.reasoning.splitlines())
    return f"{quoted}\n\n{reply.response.strip()}".strip()


def as_json_lines(chat: StoredChat, messages: Sequence[StoredMessage]) -> str:
    """One JSON object per line: the chat, then its messages (of all branches if `messages` contains them)."""
    head = {
        "chat": chat.id,
        "name": chat.name,
        "model": chat.model,
        "system": chat.system,
        "created": _timestamp(chat.created),
    }
    rows = [head, *map(_fields, messages)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _fields(message: StoredMessage) -> dict[str, object]:
    return {
        "id": message.id,
        "parent": message.parent,
        "role": message.role,
        "content": message.text,
        "state": message.state,
        "created": _timestamp(message.created),
    }


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
