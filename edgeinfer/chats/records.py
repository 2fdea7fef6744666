"""What the store of chats gives back: a chat's head, its turns, what a search found."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant"]
State = Literal["coming", "whole", "stopped", "failed"]
"""coming: being written, or cut off by a crash; stopped: by the user."""


@dataclass(frozen=True)
class StoredChat:
    """One conversation. `tip`: the turn that it was left at; None: nothing has been said."""

    id: int
    name: str | None
    title: str
    """The beginning of what was said first."""
    model: str
    system: str | None
    created: float
    """Seconds since 1970, as `changed`."""
    changed: float
    tip: int | None
    turns: int

    @property
    def label(self) -> str:
        """What a user calls it: its name, or its number."""
        return self.name or str(self.id)


@dataclass(frozen=True)
class StoredTurn:
    """One message. `parent`: the turn that it follows; turns of one parent are alternatives."""

    id: int
    chat: int
    parent: int | None
    role: Role
    text: str
    state: State
    created: float


@dataclass(frozen=True)
class Found:
    """A turn that a search found, and the place in it."""

    chat: StoredChat
    turn: StoredTurn
    excerpt: str
