"""An answer's tokens for a program that does other things in between: `async for`."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.results import Generation, Token


class AsyncTokenStream:
    """A `TokenStream` whose tokens are computed on a thread of its own.

    A task that is cancelled while it waits for a token, or `aclose`, ends the answer with finish reason
    "cancelled"; `result` holds what was said.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-stream")

    @property
    def result(self) -> Generation:
        """The answer as far as it has come."""
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
        """End the answer here; the token that is being computed is the last that is waited for."""
        self._stream.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
