"""The token stream of a completion, which the caller reads token by token."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from edgeinfer.engine.guards import ModelLock
from edgeinfer.generation.batching.scheduler import Scheduler
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.results import Generation, Token
from edgeinfer_kernels.system.locks import fork_safe_lock

Taken = TypeVar("Taken", Token, list[Token])


class TokenStream:
    """An iterator of tokens; `result` is the completion so far, or the whole one at the end.

    A `KeyboardInterrupt` or `cancel()` ends it with finish reason "cancelled"; the model stays usable.
    Several streams of one model can be read alternately, and by several threads: `lock` is the model's.
    `on_end` is called once with the completion, however it ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        live: LiveRequest,
        lock: ModelLock,
        on_end: Callable[[Generation], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._lock = lock
        self._on_end = on_end
        self._tokens: list[Token] = []
        self._has_begun = False
        self._ending = fork_safe_lock()
        self._ended = False

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        token = self._next(self.take)
        if token is None:
            raise StopIteration
        return token

    def read(self) -> Generation:
        """Read the other tokens; the whole completion, or what a cancelled stream has of it."""
        while self._next(self._take_all):
            pass
        return self.result

    def _next(self, take: Callable[[], Taken | None]) -> Taken | None:
        """What `take` returns as soon as there are tokens; None: there are no more."""
        live = self._live
        was_cancelled = live.cancelled
        live.is_awaited = not was_cancelled  # a step of another thread may compute the token
        try:
            with self._lock:
                self.begin()
                while not (live.unread or live.ended or live.cancelled):
                    if not live.step_alone():
                        self._scheduler.step()
                    elif live.ended:
                        self._scheduler.retire()
                live.is_awaited = False
                taken = None if was_cancelled else take()
        except BaseException:
            live.is_awaited = False
            self.cancel()
            raise
        if taken is None:
            self.finish()
        return taken

    def begin(self, on_change: Callable[[], None] | None = None) -> None:
        """Let the request join the next step. With `on_change`, which is called after its steps, it advances
        without a reader that waits.
        """
        if not self._has_begun:
            self._has_begun = True
            self._live.on_change = on_change
            self._scheduler.add(self._live)

    def take(self) -> Token | None:
        """The next token that has been computed already; None: there is none."""
        if not self._live.unread:
            return None
        token = self._live.unread.popleft()
        self._tokens.append(token)
        return token

    def _take_all(self) -> list[Token] | None:
        """As `take`, all tokens."""
        tokens = list(self._live.unread)
        self._live.unread.clear()
        self._tokens += tokens
        return tokens or None

    @property
    def is_done(self) -> bool:
        """Whether no token follows those that have been taken."""
        return self._live.cancelled or (self._live.ended and not self._live.unread)

    def finish(self) -> None:
        """End the stream after its last token. Raises the error that ended it."""
        self._end()
        error, self._live.error = self._live.error, None
        if error is not None and not self._live.cancelled:
            raise error

    def cancel(self) -> None:
        """Stop here; the text so far remains. Its memory is free for others before the next step. Another
        thread that reads the stream gets the token (or finishes the prompt part) that is being computed, and
        then the end.
        """
        if not self.is_done:
            self._live.cancelled = True
        if not self._live.is_awaited:
            self._end()

    def _end(self) -> None:
        with self._ending:
            first, self._ended = not self._ended, True
        if first and self._on_end:
            self._on_end(self.result)

    @property
    def result(self) -> Generation:
        """The completion so far."""
        return self._live.generation(list(self._tokens))

    def __del__(self) -> None:
        self._live.cancelled = True
