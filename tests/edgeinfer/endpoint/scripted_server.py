"""A server on this machine with scripted responses, which keeps the requests that it got."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = "/v1/models"
CHAT = "/v1/chat/completions"


@dataclass
class Reply:
    """A response: a JSON value, or the lines of an event stream. `waits`: the end is sent when it is set."""

    body: Any = None
    status: int = 200
    events: list[Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = True
    waits: threading.Event | None = None


@dataclass
class Script:
    """`replies`: path -> responses in order, of which the last one is repeated; `seen`: (path, headers,
    body) of each request; `left`: set when a client has closed a stream that waits.
    """

    replies: dict[str, list[Reply]]
    address: str = ""
    seen: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[Any]:
        """The bodies of the POST requests."""
        return [body for _, _, body in self.seen if body is not None]


def listing(*names: str, **fields: Any) -> Reply:
    """The response of /v1/models."""
    return Reply({"object": "list", "data": [{"id": name, "object": "model", **fields} for name in names]})


def deltas(*deltas: dict[str, Any], finish: str = "stop", usage: tuple[int, int] = (7, 3)) -> Reply:
    """A streamed chat completion."""
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return Reply(events=[*chunks, {"choices": [], "usage": counts}])


@contextmanager
def scripted_server(replies: dict[str, Reply | list[Reply]]) -> Iterator[Script]:
    script = Script({path: each if isinstance(each, list) else [each] for path, each in replies.items()})
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    script.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.script.seen.append((self.path, dict(self.headers), body))
        waiting = self.script.replies.get(self.path, [Reply({"error": {"message": "no such path"}}, 404)])
        reply = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        text = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.events is None:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if reply.events is None:
            self.wfile.write(text)
            return
        for event in reply.events:
            line = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            self.wfile.write(line.encode())
        if reply.waits is not None:
            self._wait(reply.waits)
        if reply.done:
            self.wfile.write(b"data: [DONE]\n\n")

    def _wait(self, waits: threading.Event) -> None:
        """Send comments until the event is set or the client has left."""
        try:
            while not waits.wait(0.01):
                self.wfile.write(b": waiting\n\n")
        except OSError:
            self.script.left.set()

    def log_message(self, format: str, *args: Any) -> None:
        """No log."""
