"""Requests to the server's application in the same process, without a network."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message

from edgeinfer.serving.batch.lines import BatchLine


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


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of the response to a POST of JSON."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 500
    text = bytearray()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # the client doesn't leave
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            text.extend(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return status, bytes(text)
