"""Several sequences in one cache with a shared prefix, which is stored once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer_kernels.backend import PAGE, PackingBackend, Places

Logits = npt.NDArray[np.float32]


class CacheFullError(Exception):
    """No page is free for another token of a sequence; another sequence has to be dropped first."""


class Sequences(Protocol):
    """Sequences that continue the engine's cache. The engine must not be used otherwise during
    their lifetime.
    """

    together: int
    """Sequences per forward; 1: a batch costs as much as processing them one after the other."""

    def fork(self, branch: int | None = None) -> int:
        """A copy of a sequence; None: of the engine's initial content."""
        ...

    def drop(self, branch: int) -> None:
        """Remove a sequence."""
        ...

    def read(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        """Append (branch, token) each; returns logits (len(tokens), vocabulary) after each.

        Raises:
            CacheFullError: nothing was processed; the cache has no space for all of these.
        """
        ...


def branches_of(engine: Engine) -> Sequences:
    """Sequences after the engine's cache content: paged if its backend supports it, else alternating."""
    paged = isinstance(engine, NativeEngine) and engine.cache.layers
    if paged and isinstance(engine, NativeEngine) and isinstance(engine.backend, PackingBackend):
        return PagedSequences(engine)
    return AlternatingSequences(engine)


@dataclass
class _Text:
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
        backend = engine.backend
        assert isinstance(backend, PackingBackend)
        self.together = backend.most_placed
        length = len(engine.ids)
        own = -(-length // PAGE)
        self._holders = dict.fromkeys(range(own), 1)
        self._begun = own - 1 if length % PAGE else None
        self._free = list(range(-(-engine.context // PAGE) - 1, own - 1, -1))
        self._stem = _Text(list(range(own)), length)
        self._texts: dict[int, _Text] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def fork(self, branch: int | None = None) -> int:
        """A copy of a sequence; None: of the engine's initial content."""
        source = self._stem if branch is None else self._texts[branch]
        for page in source.pages:
            self._holders[page] += 1
        self._next += 1
        self._texts[self._next] = _Text(list(source.pages), source.length)
        return self._next

    def drop(self, branch: int) -> None:
        """Remove a sequence; pages without other owners are freed."""
        for page in self._texts.pop(branch).pages:
            self._release(page)

    def read(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        """Append (branch, token) each, several of one branch in order; returns logits after each.

        Raises:
            CacheFullError: nothing was processed; the cache has no space for all of these.
        """
        self._make_room([branch for branch, _ in tokens])
        found = [
            self._step(tokens[first : first + self.together])
            for first in range(0, len(tokens), self.together)
        ]
        return np.concatenate(found)

    def _step(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        texts = [self._texts[branch] for branch, _ in tokens]
        positions = np.zeros(len(tokens), np.int64)
        pages = np.zeros((len(tokens), max(len(text.pages) for text in texts)), np.int64)
        for row, text in enumerate(texts):
            positions[row] = text.length
            pages[row, : len(text.pages)] = text.pages
            text.length += 1
        return self._engine.read_at([token for _, token in tokens], Places(positions, pages))

    def _make_room(self, branches: Sequence[int]) -> None:
        """Reserve exclusive pages for the new tokens, or raise `CacheFullError` before any change."""
        wanted = {branch: branches.count(branch) for branch in dict.fromkeys(branches)}
        needed = 0
        for branch, count in wanted.items():
            text = self._texts[branch]
            needed += -(-(text.length + count) // PAGE) - len(text.pages)
            needed += self._shares_begun_page(text)
        if needed > len(self._free):
            raise CacheFullError
        for branch, count in wanted.items():
            text = self._texts[branch]
            if self._shares_begun_page(text):
                self._own_begun_page(text)
            while len(text.pages) * PAGE < text.length + count:
                text.pages.append(self._take())

    def _shares_begun_page(self, text: _Text) -> bool:
        if text.length % PAGE == 0:
            return False
        page = text.pages[text.length // PAGE]
        return self._holders[page] - (page == self._begun) > 1

    def _own_begun_page(self, text: _Text) -> None:
        place = text.length // PAGE
        old, new = text.pages[place], self._take()
        for layer in self._engine.cache.layers:
            layer.copy(old * PAGE, new * PAGE, text.length % PAGE)
        self._release(old)
        text.pages[place] = new

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
        self._stem = list(engine.ids)
        self._texts: dict[int, list[int]] = {}
        self._next = 0

    def fork(self, branch: int | None = None) -> int:
        """A copy of a sequence; None: of the engine's initial content."""
        self._next += 1
        self._texts[self._next] = list(self._stem if branch is None else self._texts[branch])
        return self._next

    def drop(self, branch: int) -> None:
        """Remove a sequence."""
        del self._texts[branch]

    def read(self, tokens: Sequence[tuple[int, int]]) -> Logits:
        """Append (branch, token) each; returns logits (len(tokens), vocabulary) after each.

        Raises:
            CacheFullError: a sequence is as long as the context.
        """
        branches = [branch for branch, _ in tokens]
        if any(len(self._texts[b]) + branches.count(b) > self._engine.context for b in set(branches)):
            raise CacheFullError
        return np.stack([self._one(self._texts[branch], token) for branch, token in tokens])

    def _one(self, text: list[int], token: int) -> Logits:
        text.append(token)
        held = min(shared_prefix(self._engine.ids, text), len(text) - 1)
        self._engine.rewind(held)
        return self._engine.append(text[held:])
