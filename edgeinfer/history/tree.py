"""A chat in memory: all messages and responses, as a tree."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from edgeinfer.history.records import Role, State, StoredMessage
from edgeinfer.history.tool_messages import calls_only, chat_messages


@dataclass(eq=False)
class ChatMessage:
    """One message. `stored`: its id in the store; None: not stored (yet)."""

    role: Role
    text: str
    state: State = "whole"
    parent: "ChatMessage | None" = None
    children: "list[ChatMessage]" = field(default_factory=list)
    stored: int | None = None


class ChatTree:
    """The messages of one chat; messages with the same parent are alternatives."""

    def __init__(self, stored: Iterable[StoredMessage] = ()) -> None:
        """`stored`: messages of the store, each after its parent."""
        self.beginnings: list[ChatMessage] = []
        self._by_number: dict[int, ChatMessage] = {}
        for one in stored:
            # A damaged store may contain missing parents: their messages become roots.
            parent = None if one.parent is None else self._by_number.get(one.parent)
            message = self.add(parent, one.role, one.text, one.state)
            message.stored = one.id
            self._by_number[one.id] = message

    def add(self, parent: ChatMessage | None, role: Role, text: str, state: State = "whole") -> ChatMessage:
        """Add a message after `parent`; None: a new root."""
        message = ChatMessage(role, text, state, parent)
        (self.beginnings if parent is None else parent.children).append(message)
        return message

    def with_number(self, stored: int | None) -> ChatMessage | None:
        """The message with an id of the store, or None."""
        return None if stored is None else self._by_number.get(stored)

    def alternatives(self, message: ChatMessage) -> Sequence[ChatMessage]:
        """The messages with the same parent, including `message`, in order of creation."""
        return self.beginnings if message.parent is None else message.parent.children

    def sibling(self, message: ChatMessage, step: int) -> ChatMessage | None:
        """The alternative `step` positions further; None if it doesn't exist."""
        siblings = self.alternatives(message)
        index = siblings.index(message) + step
        return siblings[index] if 0 <= index < len(siblings) else None


def branch_to(tip: ChatMessage | None) -> list[ChatMessage]:
    """The messages from the root to `tip`, in order."""
    line = []
    while tip is not None:
        line.append(tip)
        tip = tip.parent
    return line[::-1]


def newest_end(message: ChatMessage) -> ChatMessage:
    """The newest leaf below `message`."""
    while message.children:
        message = message.children[-1]
    return message


def user_message_of(message: ChatMessage | None) -> ChatMessage | None:
    """The message of the user that a message belongs to; itself, if it is the user's."""
    while message is not None and message.role != "user":
        message = message.parent
    return message


def answered(line: Iterable[ChatMessage]) -> list[ChatMessage]:
    """The messages that the model reads: those of the user and results of tools that have a response, each
    followed by that response. A response that only calls tools counts if it has their results.
    """
    return [message for message, _ in _answered(list(line))]


def _answered(line: Sequence[ChatMessage]) -> Iterator[tuple[ChatMessage, bool]]:
    """As `answered`; of a response also whether results of its calls follow in the branch."""
    for message, after in zip_longest(line, line[1:]):
        has_results = after is not None and after.role == "tool"
        is_response = message.role == "assistant" and message.text
        if is_response and message.parent is not None and (has_results or not calls_only(message.text)):
            yield message.parent, False
            yield message, has_results


def model_messages(line: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """The `answered` messages of a branch as chat messages."""
    return [
        one
        for message, has_results in _answered(list(line))
        for one in chat_messages(message.role, message.text, has_results)
    ]
