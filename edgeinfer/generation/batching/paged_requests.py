"""Live requests in one paged cache: all advance in one forward, and share the pages of common prefixes.

A request that is alone becomes the engine's contiguous text, so it takes the fast path, with drafts.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.engine_requests import EngineStart
from edgeinfer.generation.batching.paged_cache import PAGES_PER_RUN, PagedCache, PagedText, next_positions
from edgeinfer.generation.batching.paged_sequences import PagedSequences
from edgeinfer.generation.batching.shared_steps import SharedDrafts, sample_rows
from edgeinfer.generation.context_shift import shared_with
from edgeinfer.generation.decoding import forced_tokens
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.generation.prefill import check_prompt
from edgeinfer.generation.shared_prefix import CacheFullError
from edgeinfer.speculation.drafter import Draft
from edgeinfer_kernels.backend import PAGE, BatchPositions, HiddenStates

Row = tuple[PagedText, int]
"""A sequence and the token that is appended to it."""
FEWEST_PLACES = 16
"""Sequences that advance together even if the backend's steps are smaller."""
SHORT_CHUNK = 16
"""Tokens that are read with the chunk before them: short steps split attention otherwise than long ones."""


class PagedRequests:
    """Live requests in the cache of an engine whose backend runs batches."""

    shared_unit = PAGE

    def __init__(self, engine: NativeEngine, start: EngineStart) -> None:
        self._engine = engine
        self._start = start
        self._drafts = SharedDrafts(engine, start.end_ids)
        self.cache = PagedCache(engine, self._preempt_last)
        self._holders: list[LiveRequest] = []
        """The requests with pages, in the order in which they got them."""
        self._alone: LiveRequest | None = None
        """The request that is the engine's text."""
        self._is_full = False
        """A request has given its pages up, and none has ended since."""

    @property
    def places(self) -> int:
        """Number of sequences that can advance together, maybe in more than one step of the backend."""
        return max(FEWEST_PLACES, self._step_tokens)

    @property
    def _step_tokens(self) -> int:
        return self._engine.capabilities.max_batch_tokens

    def has_place(self, live: LiveRequest) -> bool:
        """Whether it has pages, or may get some now."""
        if live.text is not None or self._alone is live:
            return True
        held = sum(holder.advances for holder in (*self._holders, self._alone) if holder is not None)
        return held < self.places and not (self._is_full and held)

    def alone(self, live: LiveRequest, limit: int | None = None) -> None:
        """One step of the only live request, as the engine's text."""
        if self._alone is not live:
            self._attach(live)
        live.engine_step(limit)

    def _attach(self, live: LiveRequest) -> None:
        """Make the request the engine's text."""
        cache, engine, ids = self.cache, self._engine, live.sequence.ids
        if live.text is not None:
            cache.store()
            cache.attach(live.text, ids)
            self._holders.remove(live)
            live.text = None
            self._start.join(live, engine)
        else:
            cache.remember()
            held = engine.reusable(min(shared_with(engine, ids, live.sequence.evicted > 0), len(ids) - 1))
            if cache.matched(ids) > held:
                cache.store()
                cache.attach(cache.open(ids), ids)
            self._start.begin(live, engine)
        self._alone = live

    def _detach(self) -> None:
        """Give the engine's text to its request as pages, or keep it as an idle prefix."""
        live, ids = self._alone, self._engine.ids
        self._alone = None
        if live is not None:
            live.leave_engine()
            if ids and live.sequence.ids[: len(ids)] == ids:
                live.text = self.cache.detach(live.sequence.ids)
                self._holders.append(live)
                return
            live.phase = "reading"
        if ids or self._engine.cache.reserved:  # what was measured without a text has reserved positions
            self.cache.store()

    def read(self, live: LiveRequest, limit: int, others: Sequence[LiveRequest]) -> None:
        """Read a chunk of the request's tokens. Those of `others` that wait with the same prompt get their
        first token with it.
        """
        self._detach()
        ids = live.sequence.ids
        if live.text is None:
            self._open(live)
        text = live.text
        assert text is not None
        self.cache.extend(text, ids)
        left = len(ids) - text.length
        count = self._chunk(text.length, left, limit)
        if not self._reserve(live, count):
            return
        live.sequence.sampler.begin()
        pages = np.array(text.pages, np.int64)
        x = self._engine.append_chunk(ids[text.length : text.length + count], text.length, pages)
        text.length += count
        self.cache.register(text, ids)
        live.progress(text.length)
        if count == left:
            logits = self._engine.last_logits(x)
            same = [other for other in others if other.phase == "waiting" and other.sequence.ids == ids]
            for each in (live, *(other for other in same if self._fork(live, other))):
                self._first_token(each, logits)

    def _chunk(self, done: int, left: int, limit: int) -> int:
        """How many of the tokens that are left are read now: whole runs of pages, about `limit` tokens, and
        as many as a step of the engine may have. No short chunk remains.
        """
        if left <= min(limit + SHORT_CHUNK, self._engine.batch):
            return left
        run = PAGES_PER_RUN * PAGE
        count = min(limit - done % run, self._engine.batch)
        return count - run if left - count <= SHORT_CHUNK and count > run else count

    @staticmethod
    def _first_token(live: LiveRequest, logits: npt.NDArray[np.float32]) -> None:
        try:
            live.first_token(logits)
        except Exception as error:
            live.fail(error)

    def _open(self, live: LiveRequest) -> None:
        """Give the request pages with the longest stored prefix."""
        sequence, shift = live.sequence, live.request.context_shift
        if shift is not None and not live.has_begun:
            sequence.ids = shift.remaining_ids(sequence.ids, shift.left_out(len(sequence.ids)))
            sequence.evicted = len(live.request.prompt_ids) - len(sequence.ids)
        check_prompt(self._engine, sequence.ids)
        live.text = self.cache.open(sequence.ids)
        self._holders.append(live)
        live.start(live.text.length)

    def _fork(self, live: LiveRequest, other: LiveRequest) -> bool:
        """Give another request the pages of this one, whose prompt is the same; False: there is no place."""
        assert live.text is not None
        if not self.has_place(other):
            return False
        try:
            other.text = self.cache.fork(live.text)
        except CacheFullError:
            return False
        self._holders.append(other)
        other.start(other.text.length)
        return True

    def decode(self, live: Sequence[LiveRequest], ahead: bool = False) -> None:
        """The next token of each request, by one forward; forced tokens are processed with it."""
        self._detach()
        for each in live:
            self._prepare(each)
        ready: list[LiveRequest] = []
        for each in live:
            if each.phase == "decoding" and each.text is not None:
                each.sequence.sampler.begin()
                if self._reserve(each, len(each.sequence.ids) - each.text.length):
                    ready.append(each)
        ready = [each for each in ready if each.text is not None]  # a later one may have given its pages up
        if not ready:
            return
        drafts = self._make_drafts(ready)
        tokens: list[Row] = []
        last: dict[int, LiveRequest] = {}
        for each in ready:
            assert each.text is not None
            text, drafted = each.text, drafts[each].ids if each in drafts else ()
            tokens += [(text, token) for token in each.sequence.ids[text.length :]]
            last[len(tokens) - 1] = each
            tokens += [(text, token) for token in drafted]
            each.batched(len(ready))
        sampled = sum(len(each.sequence.sampled) for each in ready)
        if drafts:
            self._drafts.accept(self._append(tokens), last, drafts)
        else:
            self._append_and_sample(tokens, last, ahead and not self._drafts.may_draft)
        self._drafts.end_step(len(tokens), sum(len(each.sequence.sampled) for each in ready) - sampled)

    def _make_drafts(self, live: Sequence[LiveRequest]) -> dict[LiveRequest, Draft]:
        """Drafts of requests that decode in one forward, for which there are pages without taking those of
        others.
        """
        texts = [(each, each.text) for each in live if each.text is not None]
        pending = sum(len(each.sequence.ids) - text.length for each, text in texts)
        drafts = self._drafts.draft(live, self._step_tokens - (pending - len(live)))
        for each, text in texts:
            if each in drafts:
                try:
                    self.cache.reserve(text, len(each.sequence.ids) - text.length + len(drafts[each].ids))
                except CacheFullError:
                    del drafts[each]
        return drafts

    def _append_and_sample(self, tokens: Sequence[Row], last: Mapping[int, LiveRequest], ahead: bool) -> None:
        """Append tokens to their sequences by as few forwards as possible, and sample the next token of each
        request after its `last` row.
        """
        for first in range(0, len(tokens), self._step_tokens):
            part = tokens[first : first + self._step_tokens]
            ends = {row - first: last[row] for row in last if 0 <= row - first < len(part)}
            self._advance(part, ends, ahead and len(part) == len(tokens))

    def _prepare(self, live: LiveRequest) -> None:
        """Append forced tokens, and shift a full context: the remaining tokens are read again."""
        sequence, shift = live.sequence, live.request.context_shift
        if forced := forced_tokens(sequence, self._engine.context):
            live.accept(forced)
        if shift is not None and len(sequence.ids) > self._engine.context:
            self._give_up_pages(live)
            remaining = shift.remaining_ids(sequence.ids, shift.step)
            sequence.evicted += len(sequence.ids) - len(remaining)
            sequence.shifts += 1
            sequence.ids = remaining
        if live.text is None and not live.ended:
            live.phase = "reading"

    def _advance(self, tokens: Sequence[Row], last: Mapping[int, LiveRequest], ahead: bool) -> None:
        """Append tokens to their sequences, and sample the next one after the `last` of each request, by its
        row: on the device, if that supports it. `ahead`: the same requests are likely to advance next.
        """
        x, engine = self._append(tokens), self._engine
        samples_there = engine.capabilities.sampling_history is not None
        runs_ahead = ahead and samples_there and len(last) == len(tokens)
        following = self._following(last) if runs_ahead else None
        sample_rows(engine, x, last, following)

    def _append(self, tokens: Sequence[Row]) -> HiddenStates:
        """Append tokens to sequences that have pages for them; the hidden states after each."""
        positions = next_positions([text for text, _ in tokens])
        x = self._engine.forward_batch([token for _, token in tokens], positions)
        for text, _ in tokens:
            text.length += 1
        return x

    def _following(self, last: Mapping[int, LiveRequest]) -> BatchPositions | None:
        """The positions of the tokens that follow in the same rows, unless a request ends with this one or
        has no page for it.
        """
        texts = []
        for row in range(len(last)):
            live = last[row]
            assert live.text is not None
            has_room = live.text.length < len(live.text.pages) * PAGE
            if live.sequence.remaining < 2 or not has_room or live.text.length + 1 >= self._engine.context:
                return None
            texts.append(live.text)
        return next_positions(texts)

    def _reserve(self, live: LiveRequest, count: int) -> bool:
        """Reserve pages for `count` more tokens. If there are none, a request gives its pages up: one that
        has paused, or else the one that got them last; False: this one has.
        """
        assert live.text is not None
        while True:
            try:
                self.cache.reserve(live.text, count)
            except CacheFullError:
                if self._holders == [live]:
                    raise
                last = self._last_holder()
                self._preempt(last)
                if last is live:
                    return False
            else:
                return True

    def _preempt(self, live: LiveRequest) -> None:
        """The request gives its pages up, and reads its tokens again when another one has ended."""
        self._give_up_pages(live)
        live.phase = "reading"
        self._is_full = True

    def _preempt_last(self) -> bool:
        """The engine's text needs pages, and only live requests have any."""
        if self._holders:
            self._preempt(self._last_holder())
            return True
        return False

    def _last_holder(self) -> LiveRequest:
        """The request that gives its pages up first."""
        paused = [holder for holder in self._holders if not holder.advances]
        return (paused or self._holders)[-1]

    def _give_up_pages(self, live: LiveRequest) -> None:
        if live.text is not None:
            self.cache.release(live.text, live.sequence.ids)
            self._holders.remove(live)
            live.text = None

    def release(self, live: LiveRequest) -> None:
        """The request has ended; its whole pages stay as an idle prefix."""
        self._drafts.forget(live)
        self._give_up_pages(live)
        self._is_full = False
        if self._alone is live:
            self._alone = None
            live.leave_engine()

    def sequences(self) -> PagedSequences:
        """As `Requests.sequences`."""
        return PagedSequences(self._engine, self.cache, self._preempt_last)

    def suspend(self) -> None:
        """The engine is about to be used otherwise: what its text holds stays in pages."""
        if self._alone is not None:
            self._detach()
        else:
            self.cache.remember()
