"""Drafting with a smaller model of the same vocabulary."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine
from edgeinfer.speculation import drafter
from edgeinfer.speculation.batched.paged_drafts import PagedDrafts
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.drafter import Draft, DraftText
from edgeinfer.speculation.loop_drafter import LoopDrafter
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest


class DraftModel(LoopDrafter):
    """A small engine with a separate cache, which follows the text of the target model.

    If the engine supports a draft loop, and the sampling parameters are simple enough for it, one call makes
    a whole draft; otherwise tokens are drafted one by one.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary_size: int,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        tree_width: int = 1,
        name: str = "draft model",
    ) -> None:
        size, can = engine.vocabulary_size, engine.capabilities
        super().__init__(size, vocabulary_size, can.max_draft_prompt, tree_width, loop_ends=can.ends_drafts)
        self.name = name
        self.engine = engine
        self._on_close = on_close
        self._nbytes = nbytes
        self._paged: PagedDrafts | None = None
        """The texts that are decoded together."""

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def propose(self, history: Sequence[int], request: drafter.DraftRequest) -> Draft:
        """As `Drafter.propose`."""
        if self._paged is not None:
            self._paged.leave(history)
        return super().propose(history, request)

    def prepare_each(self, texts: Sequence[DraftText]) -> list[bool]:
        """As `Drafter.prepare_each`; none if the engine can't hold several texts."""
        if self._paged is None:
            self._paged = PagedDrafts.of(self.engine, self._max_token)
        return [False] * len(texts) if self._paged is None else self._paged.prepare(texts)

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        assert self._paged is not None
        return self._paged.propose(texts)

    def forget(self, key: Hashable) -> None:
        if self._paged is not None:
            self._paged.forget(key)

    def _draft_after(self, history: Sequence[int], request: DraftRequest) -> DraftedTokens | None:
        if len(history) + MAX_DRAFTED > self.engine.context:
            return None
        missed = self._uncached_ids(history)
        if len(missed) > self.max_prompt:
            self.engine.append(missed[:-1])
            missed = missed[-1:]
        return self.engine.draft(missed, request)

    def _uncached_ids(self, history: Sequence[int]) -> list[int]:
        """The tokens of `history` that the engine hasn't cached, always including the last;
        truncates its cache.
        """
        shared = min(self.engine.cached_prefix(history), len(history) - 1)
        self.engine.rewind(shared)
        return list(history[shared:])

    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after `history`; the cache keeps the common prefix."""
        if len(history) + MAX_DRAFTED > self.engine.context:
            return None
        return self.engine.append(self._uncached_ids(history))

    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        return self.engine.append([token])

    def close(self) -> None:
        self.engine.close()
        if self._on_close:
            self._on_close()
