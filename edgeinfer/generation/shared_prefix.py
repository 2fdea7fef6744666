"""Several sequences that continue one text; in an engine that holds one text, they alternate."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.protocols import Engine

Logits = npt.NDArray[np.float32]


class CacheFullError(Exception):
    """No page is free for another token of a sequence; another sequence has to be dropped first."""


class Sequences(Protocol):
    """Sequences that continue the engine's text. The engine must not be used otherwise until `close`."""

    together: int
    """Sequences per forward; 1: a batch costs as much as processing them one after the other."""
    first: int
    """The sequence that is the engine's text."""

    def fork(self, sequence: int) -> int:
        """A copy of a sequence. Raises `CacheFullError`."""
        ...

    def drop(self, sequence: int) -> None:
        """Remove a sequence."""
        ...

    def read(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        """Append (sequence, token) each; returns logits (len(tokens), vocabulary) after each.

        Raises:
            CacheFullError: nothing was processed; the cache has no space for all of these.
        """
        ...

    def close(self) -> None:
        """Remove all sequences."""
        ...


class AlternatingSequences:
    """Sequences of an engine that holds one text at a time: differing tokens are processed again at
    each switch.
    """

    together = 1
    first = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences = {self.first: list(engine.ids)}
        self._last = self.first

    def fork(self, sequence: int) -> int:
        """A copy of a sequence."""
        self._last += 1
        self._sequences[self._last] = list(self._sequences[sequence])
        return self._last

    def drop(self, sequence: int) -> None:
        """Remove a sequence."""
        del self._sequences[sequence]

    def read(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        """Append (sequence, token) each; returns logits (len(tokens), vocabulary) after each.

        Raises:
            CacheFullError: a sequence is as long as the context.
        """
        sequences = [sequence for sequence, _ in tokens]
        if any(len(self._sequences[b]) + sequences.count(b) > self._engine.context for b in set(sequences)):
            raise CacheFullError
        return np.stack([self._one(self._sequences[sequence], token) for sequence, token in tokens])

    def _one(self, text: list[int], token: int) -> Logits:
        text.append(token)
        held = self._engine.reusable(min(shared_prefix(self._engine.ids, text), len(text) - 1))
        self._engine.rewind(held)
        return self._engine.append(text[held:])

    def close(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()
