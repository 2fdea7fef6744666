"""uvicorn with limits: number of connections, time for a request's head, clients that don't read."""

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
"""Seconds from the opening of a connection, or a request's first byte, to the end of the request's head."""
STALL_SECONDS = 20.0
"""Seconds after which a client that reads none of its pending data is disconnected."""
MAX_CONNECTIONS = 256
MIN_CONNECTIONS = 16
MAX_HEAD_BYTES = 16 << 10
BACKLOG = 64
SPARE_FILES = 64
SECONDS_PER_NOTE = 60.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedConnection(H11Protocol):
    """One client connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            transport.abort()
        else:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request; the timeout for its head starts with the first."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """The client reads too slowly: disconnect it after `STALL_SECONDS`."""
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again: cancel the timeout."""
        super().resume_writing()
        self._stop_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if the client hasn't read all data."""
        super().timeout_keep_alive_handler()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by either end."""
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
    """A server that keeps its log short when clients misbehave or file descriptors run out."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                ws="none",
                loop="asyncio",  # uvloop handles exhausted file descriptors otherwise
                log_level="error",
                use_colors=False,  # on a terminal, control characters in a log are replaced as data
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=2,
            )
        )
        self._last_note = -SECONDS_PER_NOTE
        logging.getLogger("uvicorn.error").addFilter(_is_relevant)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        asyncio.get_running_loop().set_exception_handler(self._report)
        await super().startup(sockets)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a failure outside of requests; exhausted file descriptors are logged once a minute."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_FILES:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last_note >= SECONDS_PER_NOTE:
            self._last_note = time.monotonic()
            say(f"{error.strerror}: new connections wait")


def _is_relevant(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's log is more than a disconnect or the shutdown."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and issubclass(kind, asyncio.CancelledError):
        return False
    return "timeout graceful shutdown exceeded" not in str(record.msg)


def _max_connections() -> int:
    """Maximum number of connections; leaves some file descriptors for other uses."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, soft - SPARE_FILES))
