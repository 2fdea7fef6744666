"""Completes the requests of a model: one as a stream, or several together in the thread of the caller."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from edgeinfer.engine.guards import ModelLock
from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.errors import EdgeInferError
from edgeinfer.generation.batching.scheduler import Scheduler, requests_on
from edgeinfer.generation.batching.step_thread import StepThread
from edgeinfer.generation.beam_search import BeamSearch
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.generation.prefill import context_overflow
from edgeinfer.generation.request import Prompt, Request
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.results import Generation, Token
from edgeinfer.speculation.speculator import Speculator


def completed(
    scheduler: Scheduler, lock: ModelLock, requests: Sequence[LiveRequest]
) -> Iterator[Generation | Exception]:
    """The completion of each request in order, or the error that ended it; all advance together. The lock is
    the model's; other threads use the model between two steps. Closing the iterator cancels the others.
    """
    tokens: dict[LiveRequest, list[Token]] = {live: [] for live in requests}
    for live in requests:
        live.on_change = _nothing
        scheduler.add(live)
    try:
        for live in requests:
            while not live.ended:
                with lock:
                    scheduler.step()
                for each, own in tokens.items():
                    own += each.unread
                    each.unread.clear()
            yield live.error or live.generation(tokens[live])
    finally:
        for live in requests:
            live.cancelled = True


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
        self.scheduler = Scheduler(lambda: requests_on(engine, tokenizer, batch_invariant))
        self.step_thread = StepThread(self.scheduler, lock)

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
        self, requests: Sequence[Request | Exception], speculator: Speculator | None
    ) -> Iterator[Generation | Exception]:
        """The completions of several requests, as `completed`; errors among them are returned."""
        live = [
            LiveRequest(self.engine, self.tokenizer, each, speculator)
            for each in requests
            if isinstance(each, Request)
        ]
        results = completed(self.scheduler, self.lock, live)
        for each in requests:
            yield next(results) if isinstance(each, Request) else each

    def each(
        self,
        request: Callable[[Prompt], Request],
        prompts: Sequence[Prompt],
        speculator: Speculator | None,
    ) -> Iterator[Generation | Exception]:
        """The completions of several prompts, as `together`; `request` encodes a prompt."""
        requests: list[Request | Exception] = []
        for prompt in prompts:
            try:
                requests.append(request(prompt))
            except EdgeInferError as error:
                requests.append(error)
        return self.together(requests, speculator)

    @contextmanager
    def engine_use(self, tokens: int) -> Iterator[Engine]:
        """Use the engine otherwise, for a text of this number of tokens. What it has cached stays, if it can.

        Raises:
            ContextOverflowError: the context holds less.
        """
        with self.lock:
            if tokens > self.engine.context:
                raise context_overflow(self.engine, tokens)
            self.scheduler.suspend()
            yield self.engine

    def by_beams(self, request: Request, beams: int) -> list[Generation]:
        """The completions of a beam search."""
        with self.engine_use(0) as engine:
            search = BeamSearch(engine, self.tokenizer, request, beams)
            return search.run(lambda: self.scheduler.requests.sequences())
