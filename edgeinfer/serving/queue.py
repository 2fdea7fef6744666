"""Queue of requests: some are answered together, the others wait in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edgeinfer.serving.fields import RequestError


class RequestQueue:
    """The queue of a model that answers `parallel` requests together; at most `max_waiting` wait in it."""

    def __init__(self, max_waiting: int, parallel: int = 1) -> None:
        self._max_waiting = max_waiting
        self._parallel = parallel
        self._free = asyncio.Semaphore(parallel)
        self._admitted = 0
        self._replied = 0

    @property
    def waiting(self) -> int:
        """Requests that are being read or wait for the model."""
        return self._admitted - self._replied

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._replied

    def admit(self) -> None:
        """Count a request until `leave`. Raises `RequestError` (429) if too many are waiting."""
        if self._admitted >= self._max_waiting + self._parallel:
            raise RequestError(
                f"{self.waiting} requests are waiting already; try again later", status=429, code="queue_full"
            )
        self._admitted += 1

    def leave(self) -> None:
        """End an admitted request."""
        self._admitted -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for the model; for admitted requests."""
        async with self._free:
            self._replied += 1
            try:
                yield
            finally:
                self._replied -= 1
