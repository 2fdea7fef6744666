"""One answer at a time: requests wait for their turn, in the order in which they came."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edgeinfer.serving.fields import RequestError


class Turns:
    """A queue before the model; `max_waiting` requests may wait in it."""

    def __init__(self, max_waiting: int) -> None:
        self._most_waiting = max_waiting
        self._free = asyncio.Lock()
        self._admitted = 0
        self._answered = 0

    @property
    def waiting(self) -> int:
        """Requests that are being read or wait for the model."""
        return self._admitted - self._answered

    def admit(self) -> None:
        """Count a request until `leave`. Raises `RequestError` (429) if too many wait already."""
        if self._admitted > self._most_waiting:
            raise RequestError(
                f"{self.waiting} requests are waiting already; try again later", status=429, code="queue_full"
            )
        self._admitted += 1

    def leave(self) -> None:
        """An admitted request has ended."""
        self._admitted -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the model; for requests that were admitted."""
        async with self._free:
            self._answered += 1
            try:
                yield
            finally:
                self._answered -= 1
