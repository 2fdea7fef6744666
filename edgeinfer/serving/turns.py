"""One answer at a time: requests wait for their turn, in the order in which they came."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edgeinfer.serving.asks import RequestError


class Turns:
    """A queue before the model; `most_waiting` requests may stand in it."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._free = asyncio.Lock()
        self.waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the model. Raises `RequestError` (429) if too many wait already."""
        if self._free.locked() and self.waiting >= self._most_waiting:
            raise RequestError(
                f"{self.waiting} requests are waiting already; try again later", status=429, code="queue_full"
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._free.release()
