"""`edgeinfer serve` as a process: it prints its address, serves requests, and ends at Ctrl-C."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.kernels.system.marks import NEEDS_SIGNALS
from tests.tui.conftest import CommandLine

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

PROGRAM = [sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()"]


@contextmanager
def serving(
    *arguments: str, models: Sequence[str] = ("tiny",)
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program, and its address."""
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [*PROGRAM, "serve", *models, "--port", "0", "--device", "cpu", "--draft", "none", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.stderr is not None
    try:
        output = ""
        while not (result := re.search(r"http://[\d.:]+/v1", output)):
            line = process.stderr.readline()
            assert line, output
            output += line
        yield process, result[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def get(address: str, model: str = "tiny", **headers: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{address}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


@NEEDS_SIGNALS
def test_it_serves_requests_until_ctrl_c() -> None:
    with serving("--key", "secret") as (program, address):
        assert get(address, Authorization="Bearer secret")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(address)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=20)
    assert out == ""
    assert err.endswith("edgeinfer: ended\n")
    assert program.returncode == 0


@pytest.mark.slow
def test_any_installed_model_is_loaded_on_request_and_each_request_is_logged() -> None:
    with serving("--keep-alive", "0", models=()) as (program, address):
        root = address.removesuffix("/v1")
        with urllib.request.urlopen(f"{address}/models") as reply:
            states = {each["id"]: each["state"] for each in json.load(reply)["data"]}
        assert states["tiny"] == "not loaded"
        assert get(address, model="tiny")
        with urllib.request.urlopen(f"{root}/health") as reply:
            assert json.load(reply)["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address, model="other")
        program.terminate()
        _, err = program.communicate(timeout=20)
    lines = [line.removeprefix("edgeinfer: ") for line in err.splitlines()]
    assert "loading tiny" in lines
    assert any(
        re.match(r"POST /v1/chat/completions 200, tiny, \d+ \+ 4 tokens, [\d.]+ s$", line) for line in lines
    )
    assert any(line.startswith("POST /v1/chat/completions 404, ") for line in lines)


def test_an_invalid_time_is_refused(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("serve", "--keep-alive", "soon", "--port", "0")
    assert outcome.code == 2
    assert "--keep-alive: saw 'soon', wanted seconds or a duration as 5m" in outcome.err


def test_a_used_port_is_reported_before_loading(edgeinfer: CommandLine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = edgeinfer("serve", "tiny", "--port", str(port))
    assert outcome.code == 1
    assert outcome.err.startswith(f"edgeinfer: 127.0.0.1:{port}: can't listen there (")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0", "0x0", "::", "::0", "0.0", "::ffff:0.0.0.0", "192.0.2.1", "*"]
)
def test_a_public_address_needs_an_api_key(edgeinfer: CommandLine, host: str) -> None:
    outcome = edgeinfer("serve", "tiny", "--host", host)
    assert outcome.code == 2
    assert f"--host {host} is reachable from the whole network; give a --key" in outcome.err


@pytest.mark.parametrize("host", ["a" * 300, "nowhere.invalid", "1.2.3.4.5"])
def test_an_invalid_address_gives_a_one_line_error(edgeinfer: CommandLine, host: str) -> None:
    outcome = edgeinfer("serve", "tiny", "--host", host, "--port", "0")
    assert outcome.code == 1
    assert "can't listen there (" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("key", ["", " ", "\u00e4", "a\nb"])
def test_an_invalid_key_is_refused(edgeinfer: CommandLine, key: str) -> None:
    outcome = edgeinfer("serve", "tiny", "--key", key)
    assert outcome.code == 2
    assert "--key: wanted printable ASCII characters, at least one" in outcome.err


def test_a_missing_package_is_reported(edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer_tui.system.installed_packages.find_spec", lambda name: None)
    outcome = edgeinfer("serve", "tiny")
    assert outcome.code == 1
    assert (
        "serve: needs starlette, prometheus-client, uvicorn, not installed here; "
        "pip install 'edgeinfer[serve]'" in outcome.err
    )
