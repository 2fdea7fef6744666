"""An asynchronous token stream, for `async for`, and the thread that computes its tokens."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator

from edgeinfer.engine.guards import ModelLock
from edgeinfer.generation.batching.scheduler import Scheduler
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.results import Generation, Token
from edgeinfer_kernels.system.locks import fork_safe_lock


class StepThread:
    """Runs the scheduler's steps on one thread while asynchronous streams are unfinished."""

    def __init__(self, scheduler: Scheduler, lock: ModelLock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._guard = fork_safe_lock()
        self._process: int | None = None
        """The process in which the thread runs; None: it doesn't."""

    def wake(self) -> None:
        """Run steps until no stream needs any."""
        with self._guard:
            if self._process != os.getpid():
                self._process = os.getpid()
                threading.Thread(target=self._run, name="edgeinfer-steps", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._scheduler.has_work:
                    self._process = None
                    return
            with self._lock:
                try:
                    self._scheduler.step()
                except Exception as error:  # a bug: no reader may wait forever
                    self._scheduler.fail(error)


class AsyncTokenStream:
    """A `TokenStream` whose tokens are computed on the model's thread, together with other streams.

    Cancelling a task that waits for a token, or `aclose`, ends the completion with finish reason "cancelled";
    `result` then holds the text generated so far.
    """

    def __init__(self, stream: TokenStream, thread: StepThread) -> None:
        self._stream = stream
        self._thread = thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    @property
    def result(self) -> Generation:
        """The completion so far."""
        return self._stream.result

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._stream.begin(self._report)
        try:
            token = None
            while not self._stream.is_done and (token := self._stream.take()) is None:
                self._changed.clear()
                self._thread.wake()
                await self._changed.wait()
        except BaseException:
            await self.aclose()
            raise
        if token is None:
            self._stream.finish()
            raise StopAsyncIteration
        return token

    def _report(self) -> None:
        """The thread has advanced the stream."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def aclose(self) -> None:
        """End the completion, before the next step."""
        self._stream.cancel()
        if self._loop is not None:
            self._changed.set()
            self._thread.wake()
