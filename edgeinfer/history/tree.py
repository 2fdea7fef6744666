"""A chat in memory: all messages and responses, as a tree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgeinfer.history.records import Role, State, StoredMessage


@dataclass(eq=False)
class Turn:
    """One message. `stored`: its id in the store; None: not stored (yet)."""

    role: Role
    text: str
    state: State = "whole"
    parent: "Turn | None" = None
    children: "list[Turn]" = field(default_factory=list)
    stored: int | None = None


class ChatTree:
    """The messages of one chat; messages with the same parent are alternatives."""

    def __init__(self, stored: Iterable[StoredMessage] = ()) -> None:
        """`stored`: messages of the store, each after its parent."""
        self.beginnings: list[Turn] = []
        self._by_number: dict[int, Turn] = {}
        for one in stored:
            # A damaged store may contain missing parents: their messages become roots.
            parent = None if one.parent is None else self._by_number.get(one.parent)
            turn = self.add(parent, one.role, one.text, one.state)
            turn.stored = one.id
            self._by_number[one.id] = turn

    def add(self, parent: Turn | None, role: Role, text: str, state: State = "whole") -> Turn:
        """Add a message after `parent`; None: a new root."""
        turn = Turn(role, text, state, parent)
        (self.beginnings if parent is None else parent.children).append(turn)
        return turn

    def with_number(self, stored: int | None) -> Turn | None:
        """The message with an id of the store, or None."""
        return None if stored is None else self._by_number.get(stored)

    def alternatives(self, turn: Turn) -> Sequence[Turn]:
        """The messages with the same parent, including `turn`, in order of creation."""
        return self.beginnings if turn.parent is None else turn.parent.children

    def beside(self, turn: Turn, step: int) -> Turn | None:
        """The alternative `step` positions further; None if it doesn't exist."""
        beside = self.alternatives(turn)
        place = beside.index(turn) + step
        return beside[place] if 0 <= place < len(beside) else None


def line_to(tip: Turn | None) -> list[Turn]:
    """The messages from the root to `tip`, in order."""
    line = []
    while tip is not None:
        line.append(tip)
        tip = tip.parent
    return line[::-1]


def newest_end(turn: Turn) -> Turn:
    """The newest leaf below `turn`."""
    while turn.children:
        turn = turn.children[-1]
    return turn


def answered(line: Iterable[Turn]) -> list[Turn]:
    """The messages that the model reads: user messages with a response, each followed by that response."""
    pairs = ((turn.parent, turn) for turn in line if turn.role == "assistant" and turn.text)
    return [turn for asked, answer in pairs if asked is not None for turn in (asked, answer)]


def read_by_the_model(line: Iterable[Turn]) -> list[dict[str, str]]:
    """The `answered` messages of a branch as chat messages."""
    return [{"role": turn.role, "content": turn.text} for turn in answered(line)]
