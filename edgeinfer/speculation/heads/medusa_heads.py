"""Drafting with Medusa heads: each predicts a token further ahead from one hidden state of the target."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.recent_states import RecentStatesDrafter
from edgeinfer.speculation.trees.tree_growth import TreeGrowth
from edgeinfer_kernels.backend import Backend


class MedusaHeads(RecentStatesDrafter, AutoregressiveDrafter):
    """The heads on `backend`, for the text of `target`; `heads`: their number, `vocabulary`: that of their
    output. Head i is evaluated when the first token of level i + 1 is drafted. No token depends on those of
    earlier levels.
    """

    name = "Medusa heads"

    def __init__(
        self,
        backend: Backend[Any],
        target: NativeEngine,
        nbytes: int,
        heads: int,
        vocabulary: int,
        tree_width: int = 1,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        size = target.vocabulary_size
        RecentStatesDrafter.__init__(self, backend, target, nbytes, on_close)
        AutoregressiveDrafter.__init__(self, size, size, tree_width)
        self.max_expanded = tree_width
        self._heads, self._drafted = heads, vocabulary
        self._state: Any = None
        self._level = 0

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`; no more levels than there are heads."""
        return super().propose(history, request._replace(max_tokens=min(request.max_tokens, self._heads)))

    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        self._state, self._level = self._states.before_last(history), 0
        return None if self._state is None else self._next_logits()

    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        return self._next_logits()

    def _expand(self, growth: TreeGrowth, nodes: Sequence[int]) -> list[tuple[int, npt.NDArray[np.float32]]]:
        """As `AutoregressiveDrafter._expand`: the same logits after all nodes of a level."""
        logits = self._next_logits()
        return [(node, logits) for node in nodes]

    def _next_logits(self) -> npt.NDArray[np.float32]:
        """(vocabulary of the target,): the logits of the next head."""
        logits = np.full(self._vocabulary_size, -np.inf, np.float32)
        logits[: self._drafted] = self._backend.medusa_logits(self._state, self._level)[0]
        self._level += 1
        return logits
