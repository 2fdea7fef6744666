"""Several sequences in one cache with a shared prefix, which is stored once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine, shared_prefix
from edgeinfer.engine.protocols import Engine
from edgeinfer_kernels.backend import PAGE, BatchPositions

Logits = npt.NDArray[np.float32]


class CacheFullError(Exception):
    """No page is free for another token of a sequence; another sequence has to be dropped first."""


class Sequences(Protocol):
    """Sequences that continue the engine's cache. The engine must not be used otherwise during
    their lifetime.
    """

    together: int
    """Sequences per forward; 1: a batch costs as much as processing them one after the other."""

    def fork(self, sequence: int | None = None) -> int:
        """A copy of a sequence; None: of the engine's initial content."""
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


def cached_sequences(engine: Engine) -> Sequences:
    """Sequences after the engine's cache content: paged if its backend supports it and all its caches hold
    all positions, else alternating.
    """
    is_paged = engine.capabilities.max_batch_tokens > 0
    if is_paged and isinstance(engine, NativeEngine) and engine.cache.rings is None:
        return PagedSequences(engine)
    return AlternatingSequences(engine)


@dataclass
class _PagedText:
    """The cache pages of a sequence; the last page may be partly filled."""

    pages: list[int]
    length: int


class PagedSequences:
    """Sequences that share pages; a page is copied when one of its owners appends to it.

    A page holds PAGE positions. The engine's own sequence doesn't change; one sequence may append to its
    partly filled last page.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.together = engine.capabilities.max_batch_tokens
        engine.cache.reserve(engine.context)
        length = len(engine.ids)
        own = -(-length // PAGE)
        self._holders = dict.fromkeys(range(own), 1)
        self._partial = own - 1 if length % PAGE else None
        self._free = list(range(-(-engine.context // PAGE) - 1, own - 1, -1))
        self._prefix = _PagedText(list(range(own)), length)
        self._sequences: dict[int, _PagedText] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def fork(self, sequence: int | None = None) -> int:
        """A copy of a sequence; None: of the engine's initial content."""
        source = self._prefix if sequence is None else self._sequences[sequence]
        for page in source.pages:
            self._holders[page] += 1
        self._next += 1
        self._sequences[self._next] = _PagedText(list(source.pages), source.length)
        return self._next

    def drop(self, sequence: int) -> None:
        """Remove a sequence; pages without other owners are freed."""
        for page in self._sequences.pop(sequence).pages:
            self._release(page)

    def read(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        """Append (sequence, token) each, several of one sequence in order; returns logits after each.

        Raises:
            CacheFullError: nothing was processed; the cache has no space for all of these.
        """
        self._make_room([sequence for sequence, _ in tokens])
        logits = [
            self._step(tokens[first : first + self.together])
            for first in range(0, len(tokens), self.together)
        ]
        return np.concatenate(logits)

    def _step(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        texts = [self._sequences[sequence] for sequence, _ in tokens]
        positions = np.zeros(len(tokens), np.int64)
        pages = np.zeros((len(tokens), max(len(text.pages) for text in texts)), np.int64)
        for row, text in enumerate(texts):
            positions[row] = text.length
            pages[row, : len(text.pages)] = text.pages
            text.length += 1
        return self._engine.append_batch([token for _, token in tokens], BatchPositions(positions, pages))

    def _make_room(self, sequences: Sequence[int]) -> None:
        """Reserve exclusive pages for the new tokens, or raise `CacheFullError` before any change."""
        counts = {sequence: sequences.count(sequence) for sequence in dict.fromkeys(sequences)}
        needed = 0
        for sequence, count in counts.items():
            text = self._sequences[sequence]
            needed += -(-(text.length + count) // PAGE) - len(text.pages)
            needed += self._shares_partial_page(text)
        if needed > len(self._free):
            raise CacheFullError
        for sequence, count in counts.items():
            text = self._sequences[sequence]
            if self._shares_partial_page(text):
                self._copy_partial_page(text)
            while len(text.pages) * PAGE < text.length + count:
                text.pages.append(self._take())

    def _shares_partial_page(self, text: _PagedText) -> bool:
        if text.length % PAGE == 0:
            return False
        page = text.pages[text.length // PAGE]
        return self._holders[page] - (page == self._partial) > 1

    def _copy_partial_page(self, text: _PagedText) -> None:
        index = text.length // PAGE
        old, new = text.pages[index], self._take()
        self._engine.backend.copy_positions(old * PAGE, new * PAGE, text.length % PAGE)
        self._release(old)
        text.pages[index] = new

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            self._free.append(page)


class AlternatingSequences:
    """Sequences of an engine that holds one text at a time: differing tokens are processed again at
    each switch.
    """

    together = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prefix = list(engine.ids)
        self._sequences: dict[int, list[int]] = {}
        self._next = 0

    def fork(self, sequence: int | None = None) -> int:
        """A copy of a sequence; None: of the engine's initial content."""
        self._next += 1
        self._sequences[self._next] = list(self._prefix if sequence is None else self._sequences[sequence])
        return self._next

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
