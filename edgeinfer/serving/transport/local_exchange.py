"""Requests to the server's application in the same process, without a network."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

Headers = tuple[tuple[bytes, bytes], ...]
JSON_HEADERS: Headers = ((b"host", b"localhost"), (b"content-type", b"application/json"))


@dataclass(frozen=True)
class LocalRequest:
    """A request with its whole body."""

    path: str
    body: bytes = b""
    method: str = "POST"
    query: bytes = b""
    headers: Headers = JSON_HEADERS

    def scope(self) -> dict[str, Any]:
        """The request as ASGI describes it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "headers": list(self.headers),
        }


@dataclass(frozen=True)
class ResponseHead:
    """The status and the headers of a response."""

    status: int
    headers: Headers


async def exchanged(app: ASGIApp, request: LocalRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
    """The head of the response, and the parts of its body as they are sent. Closing the generator is the
    client's disconnecting.
    """
    parts: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(request.scope(), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield ResponseHead(message["status"], tuple(message["headers"]))
            elif body := message.get("body", b""):
                yield body
        await task
    finally:
        left.set()
        await asyncio.wait({task})


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of the response to a POST of JSON."""
    status, text = 500, bytearray()
    async for part in exchanged(app, LocalRequest(path, body)):
        if isinstance(part, ResponseHead):
            status = part.status
        else:
            text += part
    return status, bytes(text)
