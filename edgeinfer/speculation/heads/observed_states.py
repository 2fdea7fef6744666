"""The hidden states of a target that a draft head hasn't processed yet, and the text that they belong to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgeinfer.engine.hidden_states import HiddenStep
from edgeinfer_kernels.caches.state_rows import StateRows

TAIL = 16
"""Tokens that are compared to recognize a text. Two texts with the same ones only give a useless draft."""
SPARE_STATES = 64
"""States that a target on a GPU may overwrite before the head reads them: those of rejected tokens."""


class ObservedText(ABC):
    """The tokens of a text whose hidden states were observed one after the other, from position `base` on.

    `end`: how many of them there are. The states themselves are kept from `first` on, counted from `base`;
    at most `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self.base = self.first = 0
        self._capacity = capacity
        self._ids: list[int] = []

    @abstractmethod
    def states(self, first: int, last: int) -> Any:
        """The states first..last, as `Backend.set_hidden` takes them."""

    @property
    def end(self) -> int:
        return len(self._ids)

    @property
    def free(self) -> int:
        """How many further states fit."""
        return self._capacity - (len(self._ids) - self.first)

    def begin(self, step: HiddenStep) -> int:
        """Drop what is no longer part of the text before a step; return how many tokens remain.

        All are dropped if the step doesn't continue them: the text then begins with the step.
        """
        kept = step.start - self.base
        if not 0 <= kept <= len(self._ids) or not self._is_part_of(step.text, kept):
            self.base, kept = step.start, 0
        del self._ids[kept:]
        self.first = min(self.first, kept)
        return kept

    def add(self, ids: Sequence[int], states: Sequence[Any]) -> None:
        """Add tokens and their states after each of some layers, as many as are `free` at most."""
        self._ids += ids

    def drop(self, first: int) -> None:
        """Drop the states before `first`."""
        self.first = first

    def cut(self, end: int) -> None:
        """Drop the tokens from `end` on."""
        del self._ids[end:]

    def restart(self, first: int) -> None:
        """Let the text begin with the token `first`, whose state is kept."""
        self.drop(first)
        self.base += first
        self.first = 0
        del self._ids[:first]

    def following(self, first: int, last: int) -> list[int]:
        """The tokens after each of first..last; all of them have been observed."""
        return self._ids[first + 1 : last + 1]

    def last_before(self, history: Sequence[int]) -> int | None:
        """The index of the token before the last one of `history`; None: its state isn't kept, or it belongs
        to another text.
        """
        last = len(history) - 2 - self.base
        if not self.first <= last < len(self._ids) or not self._is_part_of(history, last + 1):
            return None
        return last

    def _is_part_of(self, text: Sequence[int], count: int) -> bool:
        """Whether the last ones of `count` tokens are those of a text."""
        first = max(0, count - TAIL)
        return self._ids[first:count] == list(text[self.base + first : self.base + count])


class ObservedStates(ObservedText):
    """With the states in main memory, those after several layers side by side. `write_normed`: writes some
    after the final norm of the model, as `Backend.write_draft_states`, if the head reads these.
    """

    def __init__(
        self, capacity: int, width: int, write_normed: Callable[[Any, StateRows], None] | None = None
    ) -> None:
        super().__init__(capacity)
        self._write_normed = write_normed
        self._rows = StateRows(np.empty((capacity, width), np.float32), 0, capacity)

    def states(self, first: int, last: int) -> StateRows:
        """As `ObservedText.states`."""
        return self._rows[first - self.first : last - self.first]

    def add(self, ids: Sequence[int], states: Sequence[Any]) -> None:
        """As `ObservedText.add`."""
        at, column = len(self._ids) - self.first, 0
        rows = self._rows[at : at + len(ids)]
        if self._write_normed is not None:
            self._write_normed(states[0], rows)
        else:
            for each in states:
                rows.view[:, column : column + each.shape[1]] = each
                column += each.shape[1]
        super().add(ids, states)

    def space(self, count: int) -> StateRows:
        """Where the states of the next tokens are written, without `add`."""
        at = len(self._ids) - self.first
        return self._rows[at : at + count]

    def add_written(self, ids: Sequence[int]) -> None:
        """Add tokens whose states are in the `space` for them."""
        super().add(ids, ())

    def drop(self, first: int) -> None:
        """As `ObservedText.drop`."""
        kept = self.states(first, self.end)
        self._rows.array[: len(kept)] = kept.view  # numpy copies rows that overlap as if all at once
        super().drop(first)


class KeptStates(ObservedText):
    """With the states on the device of the model, which keeps those of its last positions. `rows`: what a
    backend takes for those from a position of the text on, and their number.
    """

    def __init__(self, capacity: int, rows: Callable[[int, int], Any]) -> None:
        super().__init__(capacity)
        self._rows = rows

    def states(self, first: int, last: int) -> Any:
        """As `ObservedText.states`."""
        return self._rows(self.base + first, last - first)
