"""Requests to the server's application in the same process, without a network."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message


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
