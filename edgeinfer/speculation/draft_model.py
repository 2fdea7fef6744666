"""Guesses by a smaller model of the same vocabulary."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.kv_cache import shared_prefix
from edgeinfer.language_model import Engine
from edgeinfer.speculation.one_by_one import OneByOne
from edgeinfer.speculation.pacing import MOST_DRAFTED


class DraftModel(OneByOne):
    """A small engine with a cache of its own, which follows the text that the large one writes."""

    def __init__(
        self,
        engine: Engine,
        vocabulary_size: int,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        leaves: int = 0,
        name: str = "draft model",
    ) -> None:
        self.name = name
        super().__init__(engine.vocabulary_size, vocabulary_size, leaves)
        self._engine = engine
        self._on_close = on_close
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def _behind(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits behind `history`; the cache keeps what it has in common with it."""
        if len(history) + MOST_DRAFTED > self._engine.context:
            return None
        shared = min(shared_prefix(self._engine.ids, history), len(history) - 1)
        self._engine.rewind(shared)
        return self._engine.append(list(history[shared:]))

    def _following(self, token: int) -> npt.NDArray[np.float32]:
        return self._engine.append([token])

    def close(self) -> None:
        self._engine.close()
        if self._on_close:
            self._on_close()
