"""Sources of logits, a slice at a time: the native engine, or llama.cpp."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from edgeinfer.engine.protocols import Engine
from edgeinfer.evaluation.scores import Logits
from edgeinfer.evaluation.windows import Window
from edgeinfer.llama_cpp.context import BATCH, LlamaCppContext

SLICE_ELEMENTS = 1 << 23
"""Logits per slice: 32 MiB."""


class LogitSource(Protocol):
    """A model that computes logits from an empty KV cache."""

    vocabulary_size: int

    def begin(self) -> None:
        """Clear the KV cache."""
        ...

    def skip(self, ids: Sequence[int]) -> None:
        """Append `ids` without computing logits."""
        ...

    def rows(self, ids: Sequence[int]) -> Logits:
        """Append `ids`; logits (len(ids), vocabulary) after each, valid until the next call."""
        ...


class EngineSource:
    """The native engine; it processes `step` tokens at a time (None: no limit)."""

    def __init__(self, engine: Engine, step: int | None = None) -> None:
        self._engine = engine
        self._step = step
        self.vocabulary_size = engine.vocabulary_size

    def begin(self) -> None:
        self._engine.rewind(0)

    def skip(self, ids: Sequence[int]) -> None:
        self._engine.append(ids)

    def rows(self, ids: Sequence[int]) -> Logits:
        step = self._step or max(len(ids), 1)
        parts = [self._engine.append_all(ids[first : first + step]) for first in range(0, len(ids), step)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class LlamaCppSource:
    """llama.cpp through its C API."""

    def __init__(self, context: LlamaCppContext) -> None:
        self._context = context
        self.vocabulary_size = context.vocabulary_size

    def begin(self) -> None:
        self._context.rewind(0)

    def skip(self, ids: Sequence[int]) -> None:
        self._context.read(ids)

    def rows(self, ids: Sequence[int]) -> Logits:
        return self._context.read_all(ids)


def window_slices(window: Window, vocabulary_size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the runs of tokens whose logits are needed, bounded in memory."""
    step = min(BATCH, max(1, SLICE_ELEMENTS // vocabulary_size))
    last = len(window.ids) - 1
    for begin in range(window.first, last, step):
        yield begin, min(begin + step, last)
