"""The scheduler: advances all live requests by one engine step; they join and leave at any step.

A step reads at most one chunk of one prompt, and then gives every request that is decoding its next token, so
that a running answer never waits for more than one chunk. Source: Agrawal et al. 2023, "Sarathi"
(arXiv:2308.16369); Yu et al. 2022, "Orca". The caller holds the model's lock during a step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.batching.engine_requests import EngineRequests, EngineStart
from edgeinfer.generation.batching.joined_requests import JoinedRequests
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.generation.shared_prefix import Sequences
from edgeinfer_kernels.system.locks import call_in_child

CHUNK_TOKENS = 64
"""Tokens of a prompt that are read between two decode steps; a multiple of the tokens of a run of pages."""
PAUSED_STEPS = 16
"""Steps after which the requests that don't advance count as paused."""
FULL_CHUNK_TOKENS = 256
"""The same while no request is decoding."""


class Requests(Protocol):
    """Where the live requests have their keys, values and states, and how their steps are computed."""

    shared_unit: int
    """A request uses whole multiples of this number of tokens that another one has read; 0: none."""

    @property
    def places(self) -> int:
        """Number of sequences that can advance together."""
        ...

    def has_place(self, live: LiveRequest) -> bool:
        """Whether a chunk of the request's tokens can be read now."""
        ...

    def alone(self, live: LiveRequest, limit: int | None = None) -> None:
        """One step of the only live request."""
        ...

    def read(self, live: LiveRequest, limit: int, others: Sequence[LiveRequest]) -> None:
        """Read a chunk of the request's tokens, if there is a place for it; `others` are live too."""
        ...

    def decode(self, live: Sequence[LiveRequest], ahead: bool = False) -> None:
        """The next tokens of each request. `ahead`: the next step will be one of the same requests, unless
        one ends or another arrives.
        """
        ...

    def release(self, live: LiveRequest) -> None:
        """The request has ended."""
        ...

    def sequences(self) -> Sequences:
        """The text of the engine, which is used otherwise, as the first of several sequences."""
        ...

    def suspend(self) -> None:
        """The engine is about to be used otherwise."""
        ...


def requests_on(engine: Engine, tokenizer: TextTokenizer, batch_invariant: bool) -> Requests:
    """Paged if the engine's backend runs batches and all its caches hold all positions; else each request is
    the text of an engine, which share their steps if they can. What the engine has cached is dropped.
    """
    for each in (engine, *engine.others):
        each.rewind(0)
    start = EngineStart(tokenizer, batch_invariant)
    if isinstance(engine, NativeEngine) and engine.has_pages and not engine.others:
        return PagedRequests(engine, start)
    if isinstance(engine, NativeEngine) and engine.joins_steps:
        return JoinedRequests(engine, start)
    return EngineRequests(engine, start)


class Scheduler:
    """The live requests of one model, in order of arrival. `make` returns where they have their states."""

    def __init__(self, make: Callable[[], Requests]) -> None:
        self._make = make
        self.requests = make()
        self._is_in_child = False
        call_in_child(self._forked)
        self.live: list[LiveRequest] = []
        self._arrivals: deque[LiveRequest] = deque()
        self._steps = 0
        self._only: LiveRequest | None = None
        """The request that advanced alone in the last `_only_steps` steps."""
        self._only_steps = 0

    def add(self, request: LiveRequest) -> None:
        """Let a request join the next step; any thread may call this, without the lock."""
        self._arrivals.append(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would advance a request, or drop a cancelled one."""
        return bool(self._arrivals) or any(live.is_wanted or live.cancelled for live in self.live)

    def step(self) -> None:
        """One step for all requests that are pushed, or whose readers wait."""
        self._admit()
        wanted = [live for live in self.live if live.is_wanted]
        self._steps += 1
        for live in self.live:
            live.advances = live in wanted
        for live in wanted:
            if live.phase == "decoding":
                live.timer.resume()
        try:
            if self._is_alone(wanted):
                self._run_alone(wanted[0])
            elif wanted:
                self._run_together(wanted)
        finally:
            self._retire(wanted)

    def _is_alone(self, wanted: Sequence[LiveRequest]) -> bool:
        """Whether only one request advances, and the others haven't for some steps: then it takes the fast
        path. Requests that are pulled in turns don't, because each change moves pages.
        """
        if len(wanted) != 1 or wanted[0] is not self._only:
            self._only, self._only_steps = wanted[0] if len(wanted) == 1 else None, 0
        self._only_steps += 1
        return len(wanted) == 1 and (len(self.live) == 1 or self._only_steps > PAUSED_STEPS)

    def _admit(self) -> None:
        """Take over the requests that have arrived, and drop those that are cancelled."""
        if self._is_in_child:
            self._begin_in_child()
        while self._arrivals:
            for live in self.live:
                live.is_alone = False
            arrived = self._arrivals.popleft()
            arrived.arrivals = self._arrivals
            self.live.append(arrived)
        if any(live.cancelled for live in self.live):
            self._retire(())

    def _forked(self) -> None:
        """This is a forked child: drop the requests of threads that don't exist here."""
        self._is_in_child = True
        self._arrivals.clear()
        self.live = [live for live in self.live if live.on_change is None and not live.is_awaited]
        for live in self.live:
            live.is_alone = False

    def _begin_in_child(self) -> None:
        """Drop what is cached: a thread of the parent may have been in the middle of a step. The requests of
        the forking thread read their tokens again.
        """
        self._is_in_child = False
        self.restart()

    def restart(self) -> None:
        """Drop what is cached: it isn't valid any more. The live requests read their tokens again."""
        self.requests = self._make()
        for live in self.live:
            live.leave_engine()
            live.text = None
            live.phase = "reading" if live.has_begun else "waiting"

    def _run_alone(self, live: LiveRequest) -> None:
        try:
            self.requests.alone(live)
        except Exception as error:
            live.fail(error)
        live.is_alone = live.engine is not None

    def _run_together(self, live: Sequence[LiveRequest]) -> None:
        decoding = [each for each in live if each.phase == "decoding"]
        reader = self._next_reader([each for each in live if each.phase in ("waiting", "reading")])
        if reader is not None:
            reader.turn = self._steps
            others = [each for each in live if each is not reader]
            try:
                self.requests.read(reader, CHUNK_TOKENS if decoding else FULL_CHUNK_TOKENS, others)
            except Exception as error:
                reader.fail(error)
        decoding = [each for each in decoding if each.phase == "decoding"]
        if decoding:
            try:
                self.requests.decode(decoding, ahead=len(decoding) == len(live))
            except Exception as error:  # of a forward that all share
                for each in decoding:
                    each.fail(error)

    def _next_reader(self, reading: Sequence[LiveRequest]) -> LiveRequest | None:
        """The request whose chunk is read next: in turns, so that a short prompt needn't wait for a long one.
        One that shares pages with an earlier one waits until that has read them.
        """
        ready = [each for each in reading if self.requests.has_place(each)][: self.requests.places]
        if unit := self.requests.shared_unit:
            ready = [
                each for index, each in enumerate(ready) if not self._is_read_by(ready[:index], each, unit)
            ]
        return min(ready, key=lambda each: each.turn, default=None)

    @staticmethod
    def _is_read_by(earlier: Sequence[LiveRequest], live: LiveRequest, unit: int) -> bool:
        """Whether an earlier request has yet to read tokens that this one shares, or the same prompt."""
        ids = live.sequence.ids
        for each in earlier:
            shared = shared_prefix(each.sequence.ids, ids)
            is_same = shared == len(ids) == len(each.sequence.ids)
            wanted = shared if is_same else min(shared, len(ids) - 1) // unit * unit
            if max(each.processed, live.processed) < wanted:
                return True
        return False

    def _retire(self, advanced: Sequence[LiveRequest]) -> None:
        """Release what has ended, and report to the readers of those that advanced."""
        for live in [live for live in self.live if live.ended or live.cancelled]:
            live.phase = "ended"
            self.requests.release(live)
            self.live.remove(live)
            if live.on_change is not None and live not in advanced:
                live.on_change()
        for live in advanced:
            if live.on_change is not None and (live.unread or live.ended):
                live.on_change()

    def retire(self) -> None:
        """Release the requests that have ended."""
        self._retire(())

    def fail(self, error: Exception) -> None:
        """End all live requests with an error."""
        for live in self.live:
            live.fail(error)
        self._retire(())

    def suspend(self) -> None:
        """The engine is about to be used otherwise, such as for embeddings; what it caches stays."""
        if self._is_in_child:
            self._begin_in_child()
        self.requests.suspend()
