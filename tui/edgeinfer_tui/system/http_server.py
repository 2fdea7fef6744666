"""uvicorn with bounds: connections, the time that a request's head may take, clients that don't read."""

import asyncio
import errno
import logging
import socket
import sys
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgeinfer_tui.failures import say

HEAD_SECONDS = 10.0
"""From a connection's first moment, or a request's first byte, to the end of its head."""
STALL_SECONDS = 20.0
"""A client that takes nothing of what waits for it for so long is disconnected."""
MAX_CONNECTIONS = 256
MIN_CONNECTIONS = 16
MAX_HEAD_BYTES = 16 << 10
BACKLOG = 64
SPARE_FILES = 64
SECONDS_PER_NOTE = 60.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedConnection(H11Protocol):
    """One client's connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; one too many is turned away."""
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            transport.abort()
        else:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; the clock of its head begins with the first."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """The client reads too slowly: it has `STALL_SECONDS` to go on."""
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._stop_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, whether or not its client has read all."""
        super().timeout_keep_alive_handler()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was sent away."""
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_stall_timer()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class BoundedServer(uvicorn.Server):
    """A server whose log stays short where clients misbehave or files run out."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                ws="none",
                log_level="error",
                use_colors=False,  # on a terminal, control characters in a log are taken for data
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=2,
            )
        )
        self._last_note = -SECONDS_PER_NOTE
        logging.getLogger("uvicorn.error").addFilter(_is_news)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        asyncio.get_running_loop().set_exception_handler(self._report)
        await super().startup(sockets)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A failure outside of requests; that files run out is said once a minute."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_FILES:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last_note >= SECONDS_PER_NOTE:
            self._last_note = time.monotonic()
            say(f"{error.strerror}: new connections wait")


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's log says more than that a client left or the server ends."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and issubclass(kind, asyncio.CancelledError):
        return False
    return "timeout graceful shutdown exceeded" not in str(record.msg)


def _max_connections() -> int:
    """As many as leave some files for other uses."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, soft - SPARE_FILES))
