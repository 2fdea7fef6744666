"""Drafting with several MTP heads of one file, as Step 3.5 has: each drafts one token."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer_kernels.backend import Backend


class SeveralHeads(DraftHead):
    """The heads on `backends`, for the text of `target`.

    All of them process the pairs of the text. The first one drafts the first token; head i the next one, from
    the tokens drafted so far and the states that the heads before it had at them.
    """

    name = "draft heads"

    def __init__(
        self,
        backends: Sequence[Backend[Any]],
        target: NativeEngine,
        head: DraftHeadModel,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(backends[0], target, head, nbytes, on_close)
        self.max_prompt = self._max_cycles = 0
        self._others = tuple(backends[1:])
        self._drafted = list[int]()
        self._rows = list[npt.NDArray[np.float32]]()
        """The states of the heads at the last token and at the drafted ones."""

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`; no more tokens than there are heads."""
        length = min(request.max_tokens, 1 + len(self._others))
        return super().propose(history, request._replace(max_tokens=length))

    def _limit_output(self, rows: int) -> None:
        if rows != self._output_rows:
            for backend in self._others:
                backend.limit_output(rows)
        super()._limit_output(rows)

    def _forward(self, tokens: Sequence[int], last: int) -> Any:
        """As `DraftHead._forward`, with all heads."""
        states = self._observed.states(self._done, last)
        for backend in self._others:
            backend.set_hidden(states, self._done)
            backend.forward(backend.embed(tokens), self._done)
        return super()._forward(tokens, last)

    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        logits = super()._logits_after(history)
        if logits is not None:
            self._drafted, self._rows = [], [self._state.copy()]
        return logits

    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        backend = self._others[len(self._drafted)]
        self._drafted.append(token)
        backend.set_own_hidden(np.concatenate(self._rows), self._position)
        x = backend.embed(self._drafted)
        backend.forward(x, self._position)
        self._rows.append(np.asarray(x[-1:]).copy())
        return self._of_target(backend.logits(x[-1:])[0])

    def close(self) -> None:
        for backend in self._others:
            backend.close()
        super().close()
