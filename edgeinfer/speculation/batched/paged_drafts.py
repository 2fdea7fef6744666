"""Drafts for several texts at once: a draft model whose texts share its cache in pages.

Each step of the draft model takes the next token of every text. The drafts are the most probable tokens,
however the completions are sampled. A text that finds no pages has no drafts.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.batching.paged_cache import PagedCache, PagedText, next_positions
from edgeinfer.generation.shared_prefix import CacheFullError
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.drafter import Draft, DraftText
from edgeinfer_kernels.backend import PAGE

CHUNK = 64
"""Tokens of a text that are read in one step of the target."""


@dataclass(eq=False)
class _Followed:
    """A text in the draft model's cache: its pages, and the tokens that they hold."""

    text: PagedText
    ids: list[int]


@dataclass
class _DraftInProgress:
    followed: _Followed
    wanted: DraftText
    pending: list[int]
    """The tokens to process before the next one is drafted."""
    ids: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    reached: float = 1.0

    def take(self, token: int, prob: float) -> bool:
        """Append a draft token, if it is likely enough; returns whether another one follows it."""
        request = self.wanted.request
        self.reached *= prob
        if self.reached < request.min_prob:
            return False
        self.ids.append(token)
        self.probs.append(prob)
        self.pending = [token]
        return self.reached >= request.min_prob_to_continue and len(self.ids) < request.max_tokens

    @property
    def result(self) -> Draft:
        return Draft(tuple(self.ids), probs=tuple(self.probs))


class PagedDrafts:
    """The texts that a draft model follows. Only ids below `id_limit` are drafted."""

    def __init__(self, engine: NativeEngine, id_limit: int) -> None:
        self._engine, self._id_limit = engine, id_limit
        self._cache = PagedCache(engine, self._drop_first)
        self._texts: dict[Hashable, _Followed] = {}
        self._is_used = False
        """Whether texts were drafted for since the engine's text was used."""

    @classmethod
    def of(cls, engine: Engine, id_limit: int) -> "PagedDrafts | None":
        """None: the engine can't hold several texts in pages."""
        return cls(engine, id_limit) if isinstance(engine, NativeEngine) and engine.has_pages else None

    def prepare(self, texts: Sequence[DraftText]) -> list[bool]:
        """Read a chunk of what the model has yet to read, of one of the texts; for each text whether it can
        draft now.
        """
        if not self._is_used:
            self._cache.store()
            self._is_used = True
        keys, may_read, ready = {text.key for text in texts}, True, list[bool]()
        for wanted in texts:
            if len(wanted.history) + MAX_DRAFTED > self._engine.context:
                ready.append(False)
                continue
            followed = self._followed(wanted)
            missed = len(wanted.history) - followed.text.length
            has_pages = self._reserve(wanted, followed, keys)
            if has_pages and may_read and missed > self._step_tokens:
                may_read = False
                missed -= self._read(wanted, followed, min(CHUNK, missed - 1))
            ready.append(has_pages and missed <= self._step_tokens)
        return ready

    @property
    def _step_tokens(self) -> int:
        return self._engine.capabilities.max_batch_tokens

    def _read(self, wanted: DraftText, followed: _Followed, count: int) -> int:
        """Read the next tokens of a text, which has pages for them; their number."""
        text = followed.text
        chunk = list(wanted.history[text.length : text.length + count])
        self._engine.append_chunk(chunk, text.length, np.array(text.pages, np.int64))
        text.length += count
        followed.ids += chunk
        return count

    def _reserve(self, wanted: DraftText, followed: _Followed, keys: set[Hashable]) -> bool:
        """Reserve pages for the whole text and a draft; texts that aren't among the `keys` give theirs up."""
        text = followed.text
        while True:
            try:
                self._cache.reserve(text, len(wanted.history) - text.length + MAX_DRAFTED)
            except CacheFullError:
                other = next((key for key in self._texts if key not in keys), None)
                self.forget(wanted.key if other is None else other)
                if other is None:
                    return False
            else:
                return True

    def propose(self, texts: Sequence[DraftText]) -> list[Draft]:
        """A draft for each text, which `prepare` has found ready."""
        drafts = [self._begin(text) for text in texts]
        going = [draft for draft in drafts if draft.wanted.request.max_tokens]
        while going:
            best = self._step(going)
            going = [draft for draft, next_best in zip(going, best, strict=True) if draft.take(*next_best)]
        return [draft.result for draft in drafts]

    def _begin(self, wanted: DraftText) -> _DraftInProgress:
        followed = self._texts[wanted.key]
        return _DraftInProgress(followed, wanted, list(wanted.history[followed.text.length :]))

    def _followed(self, wanted: DraftText) -> _Followed:
        """The text as far as it is in the cache, without its last token."""
        history = wanted.history
        followed = self._texts.get(wanted.key)
        if followed is not None:
            shared = min(shared_prefix(followed.ids, history), len(history) - 1)
            if shared >= len(followed.text.nodes) * PAGE:
                del followed.ids[shared:]
                followed.text.length = shared
                return followed
            self.forget(wanted.key)
        text = self._cache.open(history)
        self._texts[wanted.key] = followed = _Followed(text, list(history[: text.length]))
        return followed

    def _step(self, drafts: Sequence[_DraftInProgress]) -> list[tuple[int, float]]:
        """Process the pending tokens; the most probable token after the last one of each, and its
        probability.
        """
        rows = [(draft.followed, token) for draft in drafts for token in draft.pending]
        ends = np.cumsum([len(draft.pending) for draft in drafts]) - 1
        size, best = self._step_tokens, list[tuple[int, float]]()
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            positions = next_positions([followed.text for followed, _ in part])
            x = self._engine.forward_batch([token for _, token in part], positions)
            for followed, token in part:
                followed.text.length += 1
                followed.ids.append(token)
            last = [int(end) - first for end in ends if first <= end < first + len(part)]
            if last:
                logits = self._engine.logits(x)[last, : self._id_limit]
                tokens = logits.argmax(1)
                probs = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
                best += zip(tokens.tolist(), probs.tolist(), strict=True)
        return best

    def leave(self, history: Sequence[int]) -> None:
        """The engine's text is used again, for this text: it continues what was drafted for."""
        if not self._is_used:
            return
        self._is_used = False
        for key in list(self._texts):
            self.forget(key)
        if self._cache.matched(history):
            self._cache.attach(self._cache.open(history), history)

    def forget(self, key: Hashable) -> None:
        """The text has ended; its whole pages stay as an idle prefix."""
        followed = self._texts.pop(key, None)
        if followed is not None:
            self._cache.release(followed.text, followed.ids)

    def _drop_first(self) -> bool:
        """The engine's text needs pages."""
        if not self._texts:
            return False
        self.forget(next(iter(self._texts)))
        return True
