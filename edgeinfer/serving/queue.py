"""Queue of requests: some are answered together, the others wait in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from edgeinfer.model import Model
from edgeinfer.serving.fields import RequestError


class RequestQueue:
    """The queue of a server, each of whose models answers `Model.parallel` requests together; at most
    `max_waiting` wait in it. `parallel`: returns the number of requests that the loaded models answer.
    """

    def __init__(self, max_waiting: int, parallel: Callable[[], int]) -> None:
        self._max_waiting = max_waiting
        self._parallel = parallel
        self._free: WeakKeyDictionary[Model, asyncio.Semaphore] = WeakKeyDictionary()
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
        if self._admitted >= self._max_waiting + max(1, self._parallel()):
            raise RequestError(
                f"{self.waiting} requests are waiting already; try again later", status=429, code="queue_full"
            )
        self._admitted += 1

    def leave(self) -> None:
        """End an admitted request."""
        self._admitted -= 1

    @asynccontextmanager
    async def slot(self, model: Model) -> AsyncIterator[None]:
        """Wait for a model; for admitted requests."""
        if model not in self._free:
            self._free[model] = asyncio.Semaphore(model.parallel)
        async with self._free[model]:
            self._replied += 1
            try:
                yield
            finally:
                self._replied -= 1
