"""Request bodies, limited in size and time; and worker threads for slow parsing."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from edgeinfer.serving.fields import RequestError

Result = TypeVar("Result")

MIN_BODY_BYTES = 1 << 20
MAX_BODY_BYTES = 64 << 20
BODY_BYTES_PER_TOKEN = 64
"""Upper bound for the text of a context token, in bytes."""
BODY_SECONDS = 30.0
"""Seconds from a request's head to the end of its body."""
WORKERS = 2


def largest_body(context: int | None) -> int:
    """Maximum body size in bytes for a model with this context; None: it isn't known yet."""
    if context is None:
        return MAX_BODY_BYTES
    return min(max(MIN_BODY_BYTES, context * BODY_BYTES_PER_TOKEN), MAX_BODY_BYTES)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body. Raises `RequestError`: too large, or too slow."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise RequestError(f"the body: saw {declared[:20]} bytes, wanted {max_bytes} at most", status=413)
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > max_bytes:
                    raise RequestError(
                        f"the body: saw more than {max_bytes} bytes, the most here", status=413
                    )
    except TimeoutError:
        raise RequestError(f"the body: not complete after {BODY_SECONDS:g} seconds", status=408) from None
    return bytes(raw)


class Workers:
    """A few threads for parsing, rendering, tokenizing and compiling; further requests wait."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="edgeinfer-requests")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a function on one of the threads and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Shut the threads down without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def unless_disconnected(request: Request, response: Awaitable[Result]) -> Result | None:
    """Await the response; None if the client disconnects, which cancels it."""
    working = asyncio.ensure_future(response)
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
