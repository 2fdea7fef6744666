"""A real server under clients that stall, disconnect, flood and send wrong data: it stays up."""

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import edgeinfer
from edgeinfer import Model
from edgeinfer.serving.app import serving_app
from edgeinfer_tui.system import http_server
from tests.edgeinfer.serving.http_client import HELLO, JSON, TOOL_TEMPLATE, fake
from tests.edgeinfer.serving.mutations import mutated
from tests.tui.commands.test_serve import get, serving

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": HELLO, "max_tokens": 4}),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HELLO, "max_tokens": 9, "response_format": {"type": "json_object"}}),
    ("/v1/completions", {"prompt": ["Once", [1, 5]], "max_tokens": 4, "logprobs": 2, "stop": ["x"]}),
    ("/v1/embeddings", {"input": ["a b", "c"], "encoding_format": "float"}),
)
NO_FILES = "Too many open files"
REQUESTS = 3_000
MIXED = 2_000


class Served:
    """A server on a free port, on a thread of this process."""

    def __init__(self, model: Model) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.server = http_server.BoundedServer(serving_app(model))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> "Served":
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
            assert self.thread.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(15)
        assert not self.thread.is_alive()

    def raw(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

    def post(self, path: str, body: Any) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, raw, JSON)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def health(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/health")
            return int(json.loads(connection.getresponse().read())["waiting"])
        finally:
            connection.close()


def head(length: int, path: str = CHAT) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def until_closed(connection: socket.socket) -> bytes:
    result = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionError:
            return result
        if not part:
            return result
        result += part


def until_printed(program: subprocess.Popen[str], text: str) -> str:
    """What the program prints on stderr up to the line with `text`."""
    assert program.stderr is not None
    output = ""
    while text not in output:
        line = program.stderr.readline()
        assert line, output
        output += line
    return output


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_an_endless_request_header_is_aborted(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.1)
    with Served(fake()) as served, served.raw(sent) as connection:
        assert until_closed(connection) == b""
        assert served.health() == 0


def test_a_missing_body_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.serving.transport.bodies.BODY_SECONDS", 0.1)
    with Served(fake()) as served, served.raw(head(100)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_request_header_over_the_limit_is_refused() -> None:
    with Served(fake()) as served, served.raw(b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000) as connection:
        assert until_closed(connection).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_does_not_read_is_disconnected_and_frees_the_model(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_server, "STALL_SECONDS", 0.1)
    long = fake("x" * 60_000, 65_536)
    body = json.dumps({"messages": HELLO, "temperature": 0, "stream": True}).encode()
    with Served(long) as served:
        served.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", served.port))
            slow.sendall(head(len(body)) + body)
            status, _ = served.post(CHAT, {"messages": HELLO, "max_tokens": 3})
            assert status == 200
        assert served.health() == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_disconnects_during_upload_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Served(fake()) as served:
        for _ in range(5):
            served.raw(head(1000) + b'{"messages": [').close()
        assert served.post(CHAT, BODIES[0][1])[0] == 200
        assert served.health() == 0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_connections_over_the_limit_are_refused_and_the_server_recovers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    with Served(fake()) as served:
        held = [served.raw(b"POST / HTTP/1.1\r\n") for _ in range(8)]
        extra = [served.raw(b"") for _ in range(30)]
        assert all(until_closed(connection) == b"" for connection in extra)
        for connection in (*held, *extra):
            connection.close()
        assert served.post(CHAT, BODIES[0][1])[0] == 200
    assert capfd.readouterr().err == ""


def test_health_responds_during_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    model, started, may_continue = fake(), threading.Event(), threading.Event()
    encode = model.tokenizer.encode

    def slow(*given: Any, **named: Any) -> list[int]:
        started.set()
        assert may_continue.wait(30)
        return encode(*given, **named)

    monkeypatch.setattr(model.tokenizer, "encode", slow)
    body = json.dumps(BODIES[0][1]).encode()
    with Served(model) as served, served.raw(head(len(body)) + body) as connection:
        assert started.wait(30)
        assert served.health() == 1
        may_continue.set()
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_embeddings_of_a_disconnected_client_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = fake(), threading.Event()
    count = 0
    vectors = Model.text_vectors

    def counted(self: Model, *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        read.set()
        gone.wait(10)
        return vectors(self, *given, **named)

    gone = threading.Event()
    monkeypatch.setattr(Model, "text_vectors", counted)
    body = json.dumps({"input": ["x"] * 2_000}).encode()
    with Served(model) as served:
        connection = served.raw(head(len(body), "/v1/embeddings") + body)
        assert read.wait(10)
        connection.close()
        gone.set()
        assert served.post("/v1/embeddings", {"input": "y"})[0] == 200
    assert count < 100


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="limits of another process: Linux only")
@pytest.mark.slow
def test_a_server_out_of_file_descriptors_recovers_and_reports_it_once() -> None:
    with serving("--no-request-log") as (program, address):
        parts, process = urlsplit(address), psutil.Process(program.pid)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 10, 1024))
        target = (str(parts.hostname), int(parts.port or 0))
        held = [socket.create_connection(target, timeout=30) for _ in range(60)]
        output = until_printed(program, NO_FILES)  # while all are open
        for connection in held:
            connection.close()
        health, deadline = "", time.monotonic() + 60
        while not health and time.monotonic() < deadline:  # queued ones come first
            with contextlib.suppress(OSError):
                health = get(address)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(0.05)
        assert health
        program.send_signal(signal.SIGINT)
        output += program.communicate(timeout=30)[1]
    assert "Traceback" not in output
    assert output.count(NO_FILES) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_busy_server_without_a_traceback(number: signal.Signals) -> None:
    with serving() as (program, address):
        assert get(address)
        parts = urlsplit(address)
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 3_000}).encode()
        with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=30) as reader:
            reader.sendall(head(len(body)) + body)
            assert reader.recv(10)
            program.send_signal(number)
            _, err = program.communicate(timeout=30)
    assert "Traceback" not in err
    assert program.returncode in (0, -number)


@pytest.mark.slow
def test_thousands_of_mutated_requests_are_served_or_refused(
    capfd: pytest.CaptureFixture[str], scaled: Callable[[int], int]
) -> None:
    source, counts, requests = random.Random(45), Counter[int](), scaled(REQUESTS)
    with Served(fake(template=TOOL_TEMPLATE)) as served:
        for index in range(requests):
            path, body = BODIES[index % len(BODIES)]
            raw = json.dumps(mutated(body, source)).encode()
            if index % 10 == 0:
                shortened = bytearray(raw)
                shortened[source.randrange(len(shortened))] = source.randrange(256)
                raw = bytes(shortened[: source.randrange(len(shortened)) + 1])
            status, reply = served.post(path, raw)
            counts[status] += 1
            assert status < 500, (raw[:500], reply)
            if status != 200:
                assert len(json.loads(reply)["error"]["message"]) < 700
        assert served.health() == 0
    print(dict(counts))
    assert counts[200] > requests // 20
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_mutated_bytes_of_requests_never_stop_the_server(scaled: Callable[[int], int]) -> None:
    source = random.Random(46)
    body = json.dumps(BODIES[0][1]).encode()
    valid = head(len(body)) + body
    with Served(fake()) as served:
        for _ in range(scaled(600)):
            data = bytearray(valid)
            for _ in range(source.choice((1, 2, 8))):
                data[source.randrange(len(data))] = source.randrange(256)
            with served.raw(
                bytes(data[: source.choice((len(data), source.randrange(len(data)))) + 1])
            ) as one:
                one.shutdown(socket.SHUT_WR)
        assert served.post(CHAT, BODIES[0][1])[0] == 200


@pytest.fixture(scope="module")
def tiny() -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1) as model:
        yield model


def mixed_request(served: Served, index: int, counts: Counter[str]) -> None:
    """One of eight kinds in turn."""
    kind = index % 8
    if kind == 5:  # a reader that disconnects early
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 200}).encode()
        with served.raw(head(len(body)) + body) as reader:
            assert reader.recv(100).startswith(b"HTTP/1.1 200 ")
        counts["left"] += 1
        return
    if kind == 6:
        status, _ = served.post(CHAT, {"messages": 5})
    elif kind == 7:
        schema = {"type": "object", "properties": {f"p{index % 40}": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, raw = served.post(CHAT, {"messages": HELLO, "max_tokens": 40, "response_format": form})
        json.loads(json.loads(raw)["choices"][0]["message"]["content"])
    else:
        path, valid = BODIES[kind]
        status, _ = served.post(path, {**valid, "seed": index} if kind < 4 else valid)
    counts[str(status)] += 1


@pytest.mark.slow
def test_two_thousand_mixed_requests_leak_nothing(tiny: Model, scaled: Callable[[int], int]) -> None:
    process, counts, mixed = psutil.Process(), Counter[str](), 8 * scaled(MIXED // 8)
    with Served(tiny) as served:
        for index in range(mixed):
            if index == mixed // 4:
                warm = process.memory_info().rss, process.num_threads(), process.num_fds()
            mixed_request(served, index, counts)
        assert served.health() == 0
        grown = process.memory_info().rss - warm[0]
        threads, files = process.num_threads() - warm[1], process.num_fds() - warm[2]
    print(f"{dict(counts)}, memory +{grown >> 10} KiB, threads {threads:+}, files {files:+}")
    assert counts == {"200": mixed * 6 // 8, "left": mixed // 8, "400": mixed // 8}
    assert grown < 32 << 20
    assert threads <= 2
    assert files <= 4
