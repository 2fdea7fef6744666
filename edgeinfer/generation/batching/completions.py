"""Completes the requests of a model: one as a stream, or several together in the thread of the caller."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from edgeinfer.engine.guards import ModelLock
from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.batching.scheduler import Scheduler, requests_on
from edgeinfer.generation.beam_search import BeamSearch
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.generation.request import Request
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.results import Generation, Token
from edgeinfer.speculation.speculator import Speculator

if TYPE_CHECKING:
    from edgeinfer.generation.async_stream import StepThread


def completed(
    scheduler: Scheduler, lock: ModelLock, requests: Sequence[LiveRequest]
) -> list[Generation | Exception]:
    """The completion of each request, or the error that ended it. The lock is the model's; other threads use
    the model between two steps. A `KeyboardInterrupt` ends all.
    """
    tokens: list[list[Token]] = [[] for _ in requests]
    for live in requests:
        live.on_change = _nothing
        scheduler.add(live)
    try:
        while not all(live.ended for live in requests):
            with lock:
                scheduler.step()
            for live, own in zip(requests, tokens, strict=True):
                own += live.unread
                live.unread.clear()
    except BaseException:
        for live in requests:
            live.cancelled = True
        raise
    return [
        live.generation(own) if live.error is None else live.error
        for live, own in zip(requests, tokens, strict=True)
    ]


def _nothing() -> None:
    """All requests are looked at after each step."""


def whole(result: Generation | Exception) -> Generation:
    """A completion. Raises the error that ended it."""
    if isinstance(result, Exception):
        raise result
    return result


class Completer:
    """Completes the requests of one model; `lock` is the model's."""

    def __init__(
        self, engine: Engine, tokenizer: TextTokenizer, lock: ModelLock, batch_invariant: bool
    ) -> None:
        self.engine, self.tokenizer, self.lock = engine, tokenizer, lock
        self.scheduler = Scheduler(requests_on(engine, tokenizer, batch_invariant))

    def stream(
        self,
        request: Request,
        speculator: Speculator | None,
        on_end: Callable[[Generation], None] | None = None,
    ) -> TokenStream:
        """The stream of one request, which begins with its first token."""
        live = LiveRequest(self.engine, self.tokenizer, request, speculator)
        return TokenStream(self.scheduler, live, self.lock, on_end)

    def together(
        self, requests: Sequence[Request], speculator: Speculator | None
    ) -> list[Generation | Exception]:
        """The completions of several requests, as `completed`."""
        live = [LiveRequest(self.engine, self.tokenizer, each, speculator) for each in requests]
        return completed(self.scheduler, self.lock, live)

    def by_beams(self, request: Request, beams: int) -> list[Generation]:
        """The completions of a beam search."""
        with self.lock:
            self.scheduler.suspend()
            return BeamSearch(self.engine, self.tokenizer, request, beams).run()

    @cached_property
    def step_thread(self) -> "StepThread":
        """The thread that computes asynchronous streams."""
        from edgeinfer.generation.async_stream import StepThread  # imports asyncio, which few programs need

        return StepThread(self.scheduler, self.lock)
