"""A server on the loopback with one file; a test sets the response to each request."""

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

TAG = '"one"'


class Request(BaseHTTPRequestHandler):
    """One request; `range` is the requested first byte and end."""

    protocol_version = "HTTP/1.1"
    server: "HostileServer"

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers.items())))
        self.close_connection = True
        with self.server.lock:
            respond = self.server.script.pop(0) if self.server.script else self.server.default
        respond(self)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    @property
    def content(self) -> bytes:
        return self.server.content_of(self.path)

    @property
    def first(self) -> int:
        return int(self.headers.get("Range", "bytes=0-").split("=")[1].split("-")[0])

    def begin(self, status: int, length: int | None, **headers: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if self.server.tag:
            self.send_header("ETag", self.server.tag)
        self.send_header("Connection", "close")
        for name, value in (self.server.headers | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def partly(self, body: bytes, total: int | str | None = None) -> None:
        """The head of a 206 for `body`, which is from `first` on."""
        last = self.first + len(body) - 1
        total = len(self.content) if total is None else total
        self.begin(206, len(body), Content_Range=f"bytes {self.first}-{last}/{total}")


Responder = Callable[[Request], None]


def serve_file(request: Request) -> None:
    if request.headers.get("If-Range") not in (None, request.server.tag):
        without_ranges(request)
        return
    without_length_check(request)


def without_length_check(request: Request) -> None:
    """Supports ranges, but not If-Range."""
    body = request.content[request.first :]
    if not body:
        request.begin(416, 0)
        return
    request.partly(body)
    request.wfile.write(body)


def cut(after: int) -> Responder:
    """Declares the rest, sends `after` bytes of it and closes."""

    def respond(request: Request) -> None:
        body = request.content[request.first :]
        request.partly(body)
        request.wfile.write(body[:after])

    return respond


def stall(after: int) -> Responder:
    """Sends `after` bytes, then nothing until the test ends."""

    def respond(request: Request) -> None:
        body = request.content[request.first :]
        request.partly(body)
        request.wfile.write(body[:after])
        request.wfile.flush()
        request.server.ended.wait(10)

    return respond


def status(code: int, **headers: str) -> Responder:
    return lambda request: request.begin(code, 0, **headers)


def corrupt(at: int) -> Responder:
    """Inverts one byte."""

    def respond(request: Request) -> None:
        body = bytearray(request.content[request.first :])
        body[at] ^= 0xFF
        request.partly(bytes(body))
        request.wfile.write(body)

    return respond


def without_ranges(request: Request) -> None:
    request.begin(200, len(request.content))
    request.wfile.write(request.content)


def without_ranges_cut(after: int) -> Responder:
    def respond(request: Request) -> None:
        request.begin(200, len(request.content))
        request.wfile.write(request.content[:after])

    return respond


def without_length(request: Request) -> None:
    """The body ends when the connection closes."""
    request.begin(200, None)
    request.wfile.write(request.content)


def chunked(cut_after: int | None = None) -> Responder:
    def respond(request: Request) -> None:
        request.begin(200, None, Transfer_Encoding="chunked")
        for start in range(0, len(request.content), 1000):
            if cut_after is not None and start >= cut_after:
                return
            part = request.content[start : start + 1000]
            request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        request.wfile.write(b"0\r\n\r\n")

    return respond


def endless(start: bytes, limit: int) -> Responder:
    """Chunks without an end: `start`, then zeros; disconnects after at most `limit` bytes."""

    def respond(request: Request) -> None:
        request.begin(200, None, Transfer_Encoding="chunked")
        sent, part = 0, start
        with contextlib.suppress(OSError):
            while sent < limit:
                request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                sent += len(part)
                part = bytes(1 << 16)

    return respond


def claims_total(total: int) -> Responder:
    """Declares another length for the whole file."""

    def respond(request: Request) -> None:
        body = request.content[request.first :]
        request.partly(body, total)
        request.wfile.write(body)

    return respond


def from_elsewhere(first: int) -> Responder:
    """Sends another range than the requested one."""

    def respond(request: Request) -> None:
        body = request.content[first:]
        total = len(request.content)
        request.begin(206, len(body), Content_Range=f"bytes {first}-{total - 1}/{total}")
        request.wfile.write(body)

    return respond


def page(request: Request) -> None:
    """A web page with status 200, as a captive portal sends it."""
    body = b"<html>Log in</html>" * 100
    request.begin(200, len(body))
    request.wfile.write(body)


def redirect(to: str, **headers: str) -> Responder:
    return lambda request: request.begin(302, 0, Location=to, **headers)


def hang_up(request: Request) -> None:
    """Closes without a response."""
    request.connection.close()


class HostileServer(ThreadingHTTPServer):
    """Serves `content` on every path; a context manager."""

    daemon_threads = True

    def __init__(self, content: bytes = b"") -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.content = content
        self.tag = TAG
        self.headers: dict[str, str] = {}
        """Sent with every response."""
        self.script: list[Responder] = []
        """Responders for the next requests."""
        self.default: Responder = serve_file
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def url(self, path: str = "/model.gguf") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def content_of(self, path: str) -> bytes:
        return self.content

    def ranges(self) -> list[str]:
        """The first byte of each request."""
        requested = [headers["Range"] for _, headers in self.seen if "Range" in headers]
        return [text.split("=")[1].split("-")[0] for text in requested]

    def handle_error(self, request: object, client_address: object) -> None:
        """A disconnected client is the subject of some tests."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
