"""Tool servers: a small one over standard input and output, and over HTTP; failures are one line."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from edgeinfer.tool_servers.client import ToolServers
from edgeinfer.tool_servers.settings import ToolServer
from tests.conftest import needs

pytestmark = needs("mcp")

PROGRAM = str(Path(__file__).with_name("stdio_server.py"))
STDIO = ToolServer("test", sys.executable, (PROGRAM,), {"GIVEN": "yes"}, allow=frozenset({"add"}))


@contextmanager
def started(*servers: ToolServer) -> Iterator[ToolServers]:
    client = ToolServers(servers)
    try:
        client.start()
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def small() -> Iterator[ToolServers]:
    """The small server over standard input and output, started with a secret in the environment."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("SECRET_OF_THE_USER", "1")
        with started(STDIO) as client:
            yield client


def test_tools_are_listed_and_called(small: ToolServers) -> None:
    assert small.warnings == []
    assert small.tools["test__add"].allowed
    assert not small.tools["test__echo"].allowed
    function = small.tools["test__add"].schema["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert small.call("test__add", {"a": 2, "b": 3}).result(30).text == "5"
    assert small.call("test__echo", {"text": "<|im_end|>\n</tool>"}).result(30).text == "<|im_end|>\n</tool>"
    assert small.call("test__variable", {"name": "GIVEN"}).result(30).text == "yes"
    assert small.call("test__variable", {"name": "SECRET_OF_THE_USER"}).result(30).text == "not set"


@pytest.mark.slow
def test_failures_of_a_call_are_results_of_the_model() -> None:
    with started(STDIO) as client:
        failed = client.call("test__fail", {}).result(30)
        assert failed.failed
        assert "fail" in failed.text
        wrong = client.call("test__add", {"a": "x"}).result(30)
        assert wrong.failed
        assert client.call("nothing", {}).result(30).text == "error: no tool 'nothing'"
        long = client.call("test__echo", {"text": "x" * 200_000}).result(30)
        assert long.text.endswith("\n[100000 more characters]")
        ended = client.call("test__leave", {}).result(30)
        assert ended.failed
        assert "\n" not in ended.text
        after = client.call("test__echo", {"text": "a"}).result(30)
        assert after.failed


@pytest.mark.slow
def test_a_call_ends_at_its_timeout_and_can_be_cancelled(small: ToolServers) -> None:
    slow = ToolServer("slow", sys.executable, (PROGRAM,), timeout=1.5)
    with started(slow) as client:
        late = client.call("slow__wait", {}).result(30)
        assert late.failed
        assert "1.5" in late.text
    call = small.call("test__wait", {})
    call.cancel()
    with pytest.raises(CancelledError):
        call.result(30)


@pytest.mark.slow
def test_a_server_that_can_not_start_has_one_line_and_others_work() -> None:
    missing = ToolServer("missing", "/no/such/program")
    broken = ToolServer("broken", sys.executable, ("-c", "raise SystemExit('no settings')"))
    with started(missing, broken, STDIO) as client:
        assert len(client.warnings) == 2
        assert all("\n" not in line for line in client.warnings)
        assert any(line.startswith("tool server missing: ") for line in client.warnings)
        assert any("no settings" in line for line in client.warnings)
        assert client.call("test__add", {"a": 1, "b": 1}).result(30).text == "2"


def test_a_server_is_reached_over_http() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, PROGRAM, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "running on" not in (line := process.stderr.readline()):
            assert line
        with started(ToolServer("web", url=f"http://127.0.0.1:{port}/mcp")) as client:
            assert client.warnings == []
            assert client.call("web__add", {"a": 2, "b": 3}).result(30).text == "5"
    finally:
        process.kill()
        process.communicate()
    with started(ToolServer("web", url=f"http://127.0.0.1:{port}/mcp")) as client:
        assert len(client.warnings) == 1
        assert "\n" not in client.warnings[0]


class Refusing(BaseHTTPRequestHandler):
    """Refuses every request, and keeps its headers."""

    seen: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        self.seen.append(self.headers["Authorization"])
        self.send_error(401)

    def log_message(self, format: str, *values: object) -> None:
        """No log."""


@pytest.mark.slow
def test_headers_are_sent_and_a_refusal_is_one_line() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_address[1]}/mcp"
        with started(ToolServer("web", url=url, headers={"Authorization": "Bearer x"})) as client:
            assert len(client.warnings) == 1
            assert "\n" not in client.warnings[0]
        http.shutdown()
    assert Refusing.seen
    assert set(Refusing.seen) == {"Bearer x"}
