"""Drafting with a Gemma 4 assistant, which reads the KV caches of its target.

It keeps nothing of a text: a draft begins with the target's hidden state at the token before the last one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter
from edgeinfer.speculation.heads.recent_states import RecentStatesDrafter
from edgeinfer_kernels.backend import Backend

Floats = npt.NDArray[np.float32]


class Assistant(RecentStatesDrafter, AutoregressiveDrafter):
    """The assistant on `backend`, whose caches are those of `target`. `embed`: the target's scaled embedding
    of a token, (1, hidden size).
    """

    name = "assistant"

    def __init__(
        self,
        backend: Backend[Any],
        target: NativeEngine,
        embed: Callable[[int], Floats],
        nbytes: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        RecentStatesDrafter.__init__(self, backend, target, nbytes, on_close)
        AutoregressiveDrafter.__init__(self, target.vocabulary_size, target.vocabulary_size)
        self._embed = embed
        self._x: Any = None
        """The rows after the last layer."""
        self._position = 0
        """That of the last cached token, at which all tokens of a draft are processed."""

    def _logits_after(self, history: Sequence[int]) -> Floats | None:
        state = self._states.before_last(history)
        if state is None:
            return None
        self._position = len(history) - 2
        pair = np.concatenate([self._embed(history[-1]), state], axis=1)
        self._backend.set_hidden(pair, self._position)
        return self._logits(history[-1])

    def _logits_after_next(self, token: int) -> Floats:
        self._backend.set_hidden(self._embed(token), self._position)
        self._backend.set_own_hidden(self._x, self._position)
        return self._logits(token)

    def _logits(self, token: int) -> Floats:
        self._x = self._backend.embed([token])
        self._backend.forward(self._x, self._position)
        logits: Floats = self._backend.logits(self._x)[0]
        return logits
