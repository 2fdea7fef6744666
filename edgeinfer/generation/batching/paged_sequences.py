"""Several sequences that continue the engine's text, in pages of the scheduler's cache."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.paged_cache import PagedCache, PagedText, next_positions
from edgeinfer.generation.shared_prefix import CacheFullError


class PagedSequences:
    """Sequences that share the whole pages of their common prefix. Those that end stay as idle prefixes.

    `preempt` releases the pages of a live request, and returns whether there was one.
    """

    first = 0

    def __init__(self, engine: NativeEngine, cache: PagedCache, preempt: Callable[[], bool]) -> None:
        self._engine, self._cache, self._preempt = engine, cache, preempt
        self.together = engine.capabilities.max_batch_tokens
        ids = list(engine.ids)
        self._ids = {self.first: ids}
        self._texts = {self.first: cache.detach(ids)}
        self._last = self.first

    def fork(self, sequence: int) -> int:
        """A copy of a sequence. Raises `CacheFullError`."""
        text = self._texts[sequence]
        self._cache.register(text, self._ids[sequence])  # only pages of the tree are shared
        while True:
            try:
                fork = self._cache.fork(text)
            except CacheFullError:
                if not self._preempt():
                    raise
            else:
                break
        self._last += 1
        self._ids[self._last], self._texts[self._last] = list(self._ids[sequence]), fork
        return self._last

    def drop(self, sequence: int) -> None:
        """Remove a sequence; its whole pages stay as an idle prefix."""
        self._cache.release(self._texts.pop(sequence), self._ids.pop(sequence))

    def read(self, tokens: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
        """Append (sequence, token) each, several of one sequence in order; returns logits after each.

        Raises:
            CacheFullError: nothing was processed; the cache has no space for all of these.
        """
        sequences = [sequence for sequence, _ in tokens]
        for sequence in dict.fromkeys(sequences):
            self._reserve(self._texts[sequence], sequences.count(sequence))
        return np.concatenate(
            [
                self._step(tokens[first : first + self.together])
                for first in range(0, len(tokens), self.together)
            ]
        )

    def _reserve(self, text: PagedText, count: int) -> None:
        if text.length + count > self._engine.context:
            raise CacheFullError
        while True:
            try:
                return self._cache.reserve(text, count)
            except CacheFullError:
                if not self._preempt():
                    raise

    def _step(self, tokens: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
        texts = [self._texts[sequence] for sequence, _ in tokens]
        logits = self._engine.append_batch([token for _, token in tokens], next_positions(texts))
        for text, (sequence, token) in zip(texts, tokens, strict=True):
            self._ids[sequence].append(token)
            text.length += 1
        return logits

    def close(self) -> None:
        """Remove all sequences."""
        for sequence in list(self._texts):
            self.drop(sequence)
