"""A chat in memory: every message that was sent and every answer that was given, as a tree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgeinfer.history.records import Role, State, StoredMessage


@dataclass(eq=False)
class Turn:
    """One message. `stored`: its number in the store; None: it isn't there (yet)."""

    role: Role
    text: str
    state: State = "whole"
    parent: "Turn | None" = None
    children: "list[Turn]" = field(default_factory=list)
    stored: int | None = None


class ChatTree:
    """The turns of one chat; those that follow the same one are alternatives."""

    def __init__(self, stored: Iterable[StoredMessage] = ()) -> None:
        """`stored`: turns of the store, each behind its parent."""
        self.beginnings: list[Turn] = []
        self._by_number: dict[int, Turn] = {}
        for one in stored:
            # A damaged store may name parents that aren't there: their turns begin the chat anew.
            parent = None if one.parent is None else self._by_number.get(one.parent)
            turn = self.add(parent, one.role, one.text, one.state)
            turn.stored = one.id
            self._by_number[one.id] = turn

    def add(self, parent: Turn | None, role: Role, text: str, state: State = "whole") -> Turn:
        """A new turn behind `parent`; None: one that begins the chat anew."""
        turn = Turn(role, text, state, parent)
        (self.beginnings if parent is None else parent.children).append(turn)
        return turn

    def with_number(self, stored: int | None) -> Turn | None:
        """The turn that was read from the store under a number."""
        return None if stored is None else self._by_number.get(stored)

    def alternatives(self, turn: Turn) -> Sequence[Turn]:
        """The turns that follow the same one, `turn` among them, in the order in which they came."""
        return self.beginnings if turn.parent is None else turn.parent.children

    def beside(self, turn: Turn, step: int) -> Turn | None:
        """The alternative so many places on; None: there is none."""
        beside = self.alternatives(turn)
        place = beside.index(turn) + step
        return beside[place] if 0 <= place < len(beside) else None


def line_to(tip: Turn | None) -> list[Turn]:
    """The turns from the first one to `tip`, in order."""
    line = []
    while tip is not None:
        line.append(tip)
        tip = tip.parent
    return line[::-1]


def newest_end(turn: Turn) -> Turn:
    """The newest end of the branch that goes through `turn`."""
    while turn.children:
        turn = turn.children[-1]
    return turn


def answered(line: Iterable[Turn]) -> list[Turn]:
    """The turns of a line that a model reads: messages that were answered, each with its answer behind it."""
    pairs = ((turn.parent, turn) for turn in line if turn.role == "assistant" and turn.text)
    return [turn for asked, answer in pairs if asked is not None for turn in (asked, answer)]


def read_by_the_model(line: Iterable[Turn]) -> list[dict[str, str]]:
    """The `answered` turns of a line as messages."""
    return [{"role": turn.role, "content": turn.text} for turn in answered(line)]
