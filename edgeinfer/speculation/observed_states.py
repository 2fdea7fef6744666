"""The hidden states of a target that a draft head hasn't processed yet, and the text that they belong to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.hidden_states import HiddenStep

TAIL = 32
"""Tokens that are compared to recognize a text. Two texts with the same ones only give a useless draft."""


class ObservedStates:
    """The tokens of a text whose hidden states were observed one after the other, from position `base` on.

    `end`: how many of them there are. The states themselves are kept from `first` on, counted from `base`;
    at most `capacity`.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.base = self.first = 0
        self._ids: list[int] = []
        self._rows = np.empty((capacity, width), np.float32)

    @property
    def end(self) -> int:
        return len(self._ids)

    @property
    def free(self) -> int:
        """How many further states fit."""
        return len(self._rows) - (self.end - self.first)

    def begin(self, step: HiddenStep) -> int:
        """Drop what is no longer part of the text before a step; return how many tokens remain.

        All are dropped if the step doesn't continue them: the text then begins with the step.
        """
        kept = step.start - self.base
        if not 0 <= kept <= self.end or not self._is_part_of(step.text, kept):
            self.base, kept = step.start, 0
        del self._ids[kept:]
        self.first = min(self.first, kept)
        return kept

    def add(self, ids: Sequence[int], states: Any) -> None:
        """Add tokens and their states, as many as are `free` at most."""
        at = self.end - self.first
        self._rows[at : at + len(ids)] = states
        self._ids += ids

    def drop(self, first: int) -> None:
        """Drop the states before `first`."""
        kept = self._rows[first - self.first : self.end - self.first].copy()
        self._rows[: len(kept)] = kept
        self.first = first

    def rows(self, first: int, last: int) -> npt.NDArray[np.float32]:
        """A view of the states first..last."""
        return self._rows[first - self.first : last - self.first]

    def following(self, first: int, last: int) -> list[int]:
        """The tokens after each of first..last; all of them have been observed."""
        return self._ids[first + 1 : last + 1]

    def last_before(self, history: Sequence[int]) -> int | None:
        """The index of the token before the last one of `history`; None: its state isn't kept, or it belongs
        to another text.
        """
        last = len(history) - 2 - self.base
        if not self.first <= last < self.end or not self._is_part_of(history, last + 1):
            return None
        return last

    def _is_part_of(self, text: Sequence[int], count: int) -> bool:
        """Whether the last ones of `count` tokens are those of a text."""
        first = max(0, count - TAIL)
        return self._ids[first:count] == list(text[self.base + first : self.base + count])
