"""Requests of a batch to the server's application in the same process."""

from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from starlette.applications import Starlette

from edgeinfer.serving.batch.lines import BatchLine
from edgeinfer.serving.transport.local_exchange import post


class LocalRequests:
    """A `BatchTarget`: the server's application, which runs while this context manager is open."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._lifespan: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)

    async def post(self, line: BatchLine) -> tuple[int, bytes]:
        return await post(self._app, line.url, line.body)

    async def __aenter__(self) -> Self:
        await self._lifespan.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._lifespan.__aexit__(*error)
