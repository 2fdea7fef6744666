"""Requests' bodies: bounded in size and time; and work on them that would hold up other requests."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from edgeinfer.serving.fields import RequestError

Found = TypeVar("Found")

MIN_BODY_BYTES = 1 << 20
MAX_BODY_BYTES = 64 << 20
BODY_BYTES_PER_TOKEN = 64
"""Of the context: no text of fewer tokens is longer in practice."""
BODY_SECONDS = 30.0
"""From a request's head to the end of its body."""
WORKERS = 2


def largest_body(context: int) -> int:
    """Bytes that a request to a model of this context may have."""
    return min(max(MIN_BODY_BYTES, context * BODY_BYTES_PER_TOKEN), MAX_BODY_BYTES)


async def read_body(request: Request, most: int) -> bytes:
    """The body. Raises `RequestError`: too large, or too slow."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise RequestError(f"the body: saw {declared[:20]} bytes, wanted {most} at most", status=413)
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise RequestError(f"the body: saw more than {most} bytes, the most here", status=413)
    except TimeoutError:
        raise RequestError(f"the body: not complete after {BODY_SECONDS:g} seconds", status=408) from None
    return bytes(raw)


class Workers:
    """A few threads for parsing, rendering, tokenizing and compiling: requests beyond them wait."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="edgeinfer-requests")

    async def run(self, work: Callable[[], Found]) -> Found:
        """The result of some work on one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Give the threads back; waits for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def unless_gone(request: Request, answer: Awaitable[Found]) -> Found | None:
    """Wait for an answer; None if the client leaves: it is cancelled then."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
