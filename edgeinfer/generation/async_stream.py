"""An asynchronous token stream, for `async for`."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.results import Generation, Token


class AsyncTokenStream:
    """A `TokenStream` that computes its tokens on a separate thread.

    Cancelling a task that waits for a token, or `aclose`, ends the completion with finish reason "cancelled";
    `result` then holds the text generated so far.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-stream")

    @property
    def result(self) -> Generation:
        """The completion so far."""
        return self._stream.result

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        try:
            token = await asyncio.get_running_loop().run_in_executor(self._thread, self._next)
        except BaseException:
            await self.aclose()
            raise
        if token is None:
            self._thread.shutdown(wait=False)
            raise StopAsyncIteration
        return token

    def _next(self) -> Token | None:
        return next(self._stream, None)

    async def aclose(self) -> None:
        """End the completion; waits only for the token that is being computed."""
        self._stream.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
