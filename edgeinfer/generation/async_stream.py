"""An asynchronous token stream, for `async for`."""

import asyncio
from collections.abc import AsyncIterator

from edgeinfer.generation.batching.step_thread import StepThread
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.results import Generation, Token


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
        self._thread.report(self._loop, self._changed)

    async def aclose(self) -> None:
        """End the completion, before the next step."""
        self._stream.cancel()
        if self._loop is not None:
            self._changed.set()
            self._thread.wake()
