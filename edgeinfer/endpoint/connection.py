"""Requests to a server with OpenAI's API: JSON, event streams, and errors of one line."""

import http.client
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError, shortened, shown

STALL_SECONDS = 600.0
"""Seconds without data after which a request fails: a busy server queues requests for minutes."""
CONNECT_SECONDS = 20.0
MAX_BODY_BYTES = 256 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE = 300
LATER = (408, 425, 429, 502, 503, 504)
"""Statuses after which the same request may succeed."""
_TOO_LONG = ("context length", "context size", "context window", "the context holds", "too many tokens")
"""Texts with which servers refuse a prompt that is longer than the context."""
BROKEN = (OSError, http.client.HTTPException)


class EndpointError(EdgeInferError):
    """The server can't be reached, or refuses a request. `is_temporary`: it may succeed later."""

    def __init__(self, message: str, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class EventStream:
    """The events of a response, each a JSON object. `close` may be called by another thread."""

    def __init__(
        self, url: str, response: http.client.HTTPResponse, connection: socket.socket | None
    ) -> None:
        self._url, self._response, self._connection = url, response, connection
        self._lock, self._is_closed = threading.Lock(), False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises `EndpointError`: the connection breaks before the last event, or the server reports a
        failure.
        """
        try:
            while line := self._line():
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                yield self._event(data)
        except BROKEN as error:
            raise EndpointError(f"{self._url}: {reason_of(error)} during the response", True) from error
        raise EndpointError(f"{self._url}: the response ended before its last event", True)

    def _line(self) -> bytes:
        with self._lock:
            return b"" if self._is_closed else self._response.readline(MAX_EVENT_BYTES)

    def _event(self, data: bytes) -> dict[str, Any]:
        event = _json(data)
        if not isinstance(event, dict):
            raise EndpointError(f"{self._url}: saw the event {shown(data)}, wanted a JSON object")
        if event.get("error") is not None:
            raise EndpointError(f"{self._url}: {_message(event)}")
        return event

    def close(self) -> None:
        """End the response: the server then cancels its work. A thread that reads gets an error."""
        if self._connection is not None:
            _shut(self._connection)
            self._connection.close()
            with self._lock, suppress(*BROKEN):  # the response holds the socket too
                self._is_closed = True
                self._response.close()


def _shut(connection: socket.socket) -> None:
    """End a connection; a thread that reads from it gets an error."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Endpoint:
    """A server. `base_url`: its address with the path of the API, "/v1" if there is none; `key`: sent as a
    bearer token. Thread-safe: each request has a connection.

    Raises `SettingError`: an address that isn't one.
    """

    def __init__(self, base_url: str, key: str | None = None, stall_seconds: float = STALL_SECONDS) -> None:
        self._parts = _parts(base_url)
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise SettingError("key: wanted printable ASCII characters, at least one")
        self._key, self._stall_seconds = key, stall_seconds
        self._lock, self._held, self._is_aborted = threading.Lock(), set[socket.socket](), False
        self.url = f"{self._parts.scheme}://{self._parts.netloc}{self._parts.path}"
        """The address, without a trailing slash."""

    def of_its_own(self) -> "Endpoint":
        """The same server, whose requests `abort` ends without ending those of others."""
        return Endpoint(self.url, self._key, self._stall_seconds)

    def abort(self) -> None:
        """End the requests in progress, other than streams, in all threads, and refuse later ones."""
        with self._lock:
            self._is_aborted = True
            held = list(self._held)
        for connection in held:
            _shut(connection)

    @property
    def exposes_key(self) -> bool:
        """Whether the key is sent over a network without encryption."""
        local = self._parts.hostname in ("localhost", "127.0.0.1", "::1")
        return self._key is not None and self._parts.scheme == "http" and not local

    def get_bytes(self, path: str) -> tuple[int, bytes]:
        """The status and the body of what is at a path, as "/models". Raises `EndpointError`."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON value of the response. Raises `EndpointError`, and `ContextOverflowError`: the prompt is
        too long for the server.
        """
        return self.value_of(path, *self.post_bytes(path, json.dumps(body).encode()))

    def post_bytes(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of the response. Raises `EndpointError`: there is none."""
        return self._exchange("POST", path, body)

    def events(self, path: str, body: Mapping[str, Any]) -> EventStream:
        """The events of a streamed response. Raises: as `post`."""
        connection, held = self._connection()
        try:
            response = self._sent(connection, "POST", path, json.dumps(body).encode())
            if response.status == 200:
                return EventStream(self.url + path, response, held)
            raise self._refusal(path, response.status, response.read(MAX_BODY_BYTES), response)
        except BROKEN as error:
            connection.close()
            raise self._unreachable(path, error) from error
        except BaseException:
            connection.close()
            raise

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            connection, held = self._connection()
            self._hold(held)
            try:
                response = self._sent(connection, method, path, body)
                if 300 <= response.status < 400:
                    raise self._refusal(path, response.status, b"", response)
                return response.status, response.read(MAX_BODY_BYTES)
            finally:
                self._release(held)
                connection.close()
        except BROKEN as error:
            raise self._unreachable(path, error) from error

    def _hold(self, connection: socket.socket | None) -> None:
        with self._lock:
            if connection is not None and not self._is_aborted:
                self._held.add(connection)
                return
        if connection is not None:
            _shut(connection)

    def _release(self, connection: socket.socket | None) -> None:
        with self._lock:
            if connection is not None:
                self._held.discard(connection)

    def _connection(self) -> tuple[http.client.HTTPConnection, socket.socket | None]:
        """An open connection, through the proxy of the environment if there is one, and its socket."""
        if self._is_aborted:
            raise EndpointError(f"{self.url}: the request was cancelled")
        parts, host = self._parts, self._parts.hostname or ""
        proxy = urllib.request.getproxies().get(parts.scheme)
        through = _parts(proxy) if proxy and not urllib.request.proxy_bypass(host) else None
        at = through or parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(at.hostname or "", at.port, timeout=CONNECT_SECONDS)
        if through is not None:
            connection.set_tunnel(host, parts.port)
        try:
            connection.connect()
        except BROKEN as error:
            raise self._unreachable("", error) from error
        held: socket.socket | None = connection.sock
        if held is not None:
            held.settimeout(self._stall_seconds)
        return connection, held

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = {"User-Agent": "edgeinfer", "Accept-Encoding": "identity", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection.request(method, self._parts.path + path, body, headers)
        return connection.getresponse()

    def value_of(self, path: str, status: int, text: bytes) -> Any:
        """The JSON value of a response. Raises: as `post`."""
        if status != 200:
            raise self._refusal(path, status, text)
        value = _json(text)
        if value is None:
            raise EndpointError(f"{self.url}{path}: the response isn't JSON; is this OpenAI's API?")
        return value

    def _refusal(
        self, path: str, status: int, text: bytes, response: http.client.HTTPResponse | None = None
    ) -> EdgeInferError:
        """The error of a response's status."""
        seen, message = f"{self.url}{path}: {status}", _message(_json(text))
        if 300 <= status < 400:
            target = shortened(str(response.getheader("Location")) if response else "", MAX_MESSAGE)
            return EndpointError(f"{seen}, redirects to {target}; give that address (base_url=)")
        if status in (401, 403):
            hint = "give the server's key (key=)" if self._key is None else "the key is wrong for it"
            return EndpointError(f"{seen}, {message}; {hint}")
        if status in (400, 413, 422) and any(text in message.lower() for text in _TOO_LONG):
            return ContextOverflowError(f"{self.url}: {message}")
        return EndpointError(f"{seen}, {message}", status in LATER)

    def _unreachable(self, path: str, error: BaseException) -> EndpointError:
        why = reason_of(error)
        is_wrong = isinstance(error, ssl.SSLError)
        return EndpointError(f"{self.url}{path}: can't be reached ({why}); is the server up?", not is_wrong)


def _parts(base_url: str) -> SplitResult:
    try:
        parts = urlsplit(base_url.strip())
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018 - raises for a port that is no number
    except ValueError:
        is_valid = False
    if not is_valid or not base_url.isascii() or any(letter <= " " for letter in base_url.strip()):
        raise SettingError(f"base_url: saw {shown(base_url)}, wanted an address as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/") or "/v1"
    return parts._replace(path=path, query="", fragment="", netloc=parts.netloc.rpartition("@")[2])


def _json(text: bytes) -> Any:
    """The JSON value; None: it isn't JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message(value: Any) -> str:
    """The message of an error object, on one line; servers nest it differently."""
    for _ in range(3):
        if not isinstance(value, dict):
            break
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), None)
    text = value if isinstance(value, str) else "without a message" if value is None else shown(value)
    return shortened(" ".join(text.split()), MAX_MESSAGE)


def reason_of(error: BaseException) -> str:
    """Short description of a failed connection."""
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't valid: {error.verify_message}"
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionResetError):
        return "the connection was closed"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
