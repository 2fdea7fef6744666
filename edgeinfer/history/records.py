"""Records of the chat store: chats, messages, search results."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

TITLE_LENGTH = 60
ATTACHMENT = re.compile(r"\n\n([^\n]+):\n(`{3,})[^\n`]*\n")
"""Matches the start of an attached file's text: the file's name, then a fence."""
Role = Literal["user", "assistant", "tool"]
"""tool: the results of the tool calls of the response before it (`tool_results.py`)."""
State = Literal["coming", "whole", "stopped", "failed"]
"""coming: in progress, or interrupted by a crash; stopped: by the user."""


@dataclass(frozen=True)
class StoredChat:
    """One chat. `tip`: last message of the current branch; None: the chat is empty."""

    id: int
    name: str | None
    title: str
    """The beginning of the first message."""
    model: str
    system: str | None
    created: float
    """Seconds since 1970, as `changed`."""
    changed: float
    tip: int | None
    messages: int

    @property
    def label(self) -> str:
        """The name of the chat, or its number."""
        return self.name or str(self.id)


@dataclass(frozen=True)
class StoredMessage:
    """One message. `parent`: id of the previous message; messages with the same parent are alternatives."""

    id: int
    chat: int
    parent: int | None
    role: Role
    text: str
    state: State
    created: float


@dataclass(frozen=True)
class SearchHit:
    """A message found by a search, with an excerpt."""

    chat: StoredChat
    message: StoredMessage
    excerpt: str


def stored_chat(row: Sequence[object]) -> StoredChat:
    """A chat from a database row: id, name, first text, model, system, created, changed, tip, messages.

    Values of wrong types, possible in a damaged store, are converted to displayable ones.
    """
    id_, name, opening, model, system, created, changed, tip, messages = row
    return StoredChat(
        _whole(id_) or 0,
        None if name is None else _text(name),
        title_of(_text(opening)),
        _text(model),
        None if system is None else _text(system),
        _seconds(created),
        _seconds(changed),
        _whole(tip),
        _whole(messages) or 0,
    )


def stored_message(row: Sequence[object]) -> StoredMessage:
    """A message from a database row: id, chat, parent, role, text, state, created; as `stored_chat`."""
    id_, chat, parent, role, text, state, created = row
    return StoredMessage(
        _whole(id_) or 0,
        _whole(chat) or 0,
        _whole(parent),
        role if role in get_args(Role) else "user",  # type: ignore[arg-type]
        _text(text),
        state if state in get_args(State) else "failed",  # type: ignore[arg-type]
        _seconds(created),
    )


def written_part(message: str) -> str:
    """A message without the texts of files appended for `@path`."""
    for match in ATTACHMENT.finditer(message):
        before = message[: match.start()]
        if re.search(rf'@(?:"[^"\n]*|\S*){re.escape(match[1])}', before):
            return before
    return message


def title_of(message: str) -> str:
    """The beginning of a message on one line of at most `TITLE_LENGTH` characters."""
    line = " ".join(written_part(message).split())
    return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 3] + "..."


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _seconds(value: object) -> float:
    """A time from 1970 to 9999."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 2.5e11 else 0.0
