"""Commands with `--engine openai`: run, chats, the store and batches against a real server."""

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from edgeinfer import Model
from edgeinfer_tui import prompt_source
from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.library import load_model
from edgeinfer_tui.options.parsed_options import ParsedOptions
from edgeinfer_tui.terminal_chat.line_chat import LineChat
from tests.edgeinfer.endpoint.scripted_server import CHAT, MODELS, Reply, deltas, listing, scripted_server
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import HELLO, served
from tests.tui.conftest import CommandLine

LIMITS = ("--max-tokens", "8", "--temperature", "0")


def seeded() -> Model:
    return model_on(FakeEngine(seeded_logits, 512))


@pytest.fixture
def url() -> Iterator[str]:
    with served(seeded()) as address:
        yield address


@pytest.fixture(autouse=True)
def _no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, "")


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    monkeypatch.setattr(prompt_source, "has_input_within", lambda raw, seconds: True)


def test_run_prints_the_text_of_the_server(edgeinfer: CommandLine, url: str) -> None:
    expected = seeded().generate("Hi", raw=False, max_tokens=8, temperature=0.0).text
    outcome = edgeinfer("run", "fake", "Hi", "--engine", "openai", "--base-url", url, *LIMITS)
    assert (outcome.code, outcome.out, outcome.err) == (0, expected.rstrip("\n") + "\n", "")


def test_the_address_and_the_key_may_be_settings(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(seeded(), key="secret") as address:
        for name, value in (("ENGINE", "openai"), ("BASE_URL", address), ("KEY", "secret")):
            monkeypatch.setenv(f"EDGEINFER_{name}", value)
        outcome = edgeinfer("run", "fake", "Hi", "--verbose", *LIMITS)
        assert outcome.code == 0
        assert f"edgeinfer: edgeinfer at {address}/v1 computes" in outcome.err
        shown = edgeinfer("config").out + edgeinfer("config", "--json").out
    assert "secret" not in outcome.err + shown
    assert "(hidden)" in shown


def test_several_completions_and_lines_are_requests(
    edgeinfer: CommandLine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = ("--engine", "openai", "--base-url", url)
    outcome = edgeinfer("run", "fake", "Hi", "-n", "2", "-o", "json", "--seed", "1", *LIMITS[:2], *remote)
    assert [json.loads(line)["usage"]["generated_tokens"] for line in outcome.out.splitlines()] == [8, 8]
    pipe_in(monkeypatch, "a\nb\n")
    outcome = edgeinfer("run", "fake", "--batch", "-o", "json", *LIMITS, *remote)
    expected = [seeded().generate(text, raw=False, max_tokens=8, temperature=0.0).text for text in "ab"]
    assert [json.loads(line)["text"] for line in outcome.out.splitlines()] == expected


def test_a_chat_is_stored_and_continued_with_the_name_of_the_server(edgeinfer: CommandLine, url: str) -> None:
    remote = ("--engine", "openai", "--base-url", url)
    assert edgeinfer("run", "fake", "Hi", "--session", "foxes", *LIMITS, *remote).code == 0
    assert edgeinfer("run", "--continue", "And?", *LIMITS, *remote).code == 0
    history = edgeinfer("history", "--json").out
    assert json.loads(history)[0]["model"] == "fake"


def test_the_line_chat_talks_to_a_server(capsys: pytest.CaptureFixture[str], url: str) -> None:
    from edgeinfer_tui.chat_session import ChatSession

    class Lines:
        can_prefill = False
        messages = iter(["Hi", "/stats"])

        def read(self, prefill: str = "") -> str:
            for message in self.messages:
                return message
            raise EOFError

        def load_history(self) -> None: ...

        def save_history(self) -> None: ...

    options = ParsedOptions("fake", None, {"engine": "openai", "base_url": url})
    model = load_model("fake", options.loading, lambda *_: None, lambda *_: None)
    lines: Any = Lines()
    LineChat(model, ChatSession(), {"max_tokens": 8, "temperature": 0.0}, lines).run()
    printed = capsys.readouterr()
    assert printed.out.strip() == seeded().chat().say("Hi", max_tokens=8, temperature=0.0).text.strip()
    assert "fake, context 512 tokens" in printed.err
    assert "1 message from you, context" in printed.err


def test_ctrl_c_keeps_the_text_so_far(edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.endpoint.remote_stream import RemoteStream

    def interrupted(stream: RemoteStream) -> None:
        if stream.result.text:
            raise KeyboardInterrupt

    plain = RemoteStream.__next__

    def next_token(stream: RemoteStream) -> Any:
        interrupted(stream)
        return plain(stream)

    monkeypatch.setattr(RemoteStream, "__next__", next_token)
    waits = threading.Event()
    reply = Reply(events=[{"choices": [{"index": 0, "delta": {"content": "A fox"}}]}], waits=waits)
    with scripted_server({MODELS: listing("m"), CHAT: reply}) as server:
        outcome = edgeinfer("run", "m", "Hi", "--engine", "openai", "--base-url", server.address)
        assert server.left.wait(20)
        waits.set()
    assert (outcome.code, outcome.out) == (INTERRUPTED, "A fox\n")


def test_an_unknown_context_is_left_out(edgeinfer: CommandLine) -> None:
    with scripted_server({MODELS: listing("m"), CHAT: deltas({"content": "A"})}) as server:
        outcome = edgeinfer("run", "m", "Hi", "--speed", "--engine", "openai", "--base-url", server.address)
    assert outcome.err.rstrip().endswith("context 10")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run m Hi", "--base-url: saw None, wanted the server's address"),
        (
            "run m Hi --base-url http://127.0.0.1:9 --threads 2",
            "--threads: the server of the engine 'openai'",
        ),
        ("run m Hi --base-url localhost:80", "--base-url: saw 'localhost:80', wanted an address as http://"),
        ("serve m", "--engine openai: its server answers programs itself"),
        ("pull tiny", "--engine openai: its server has the models"),
    ],
)
def test_mistakes_are_one_line(edgeinfer: CommandLine, command: str, message: str) -> None:
    outcome = edgeinfer(*command.split(), "--engine", "openai")
    assert outcome.code in (1, 2)
    assert outcome.err.startswith(f"edgeinfer: {message}")
    assert outcome.err.count("\n") == 1


def test_a_batch_runs_on_a_server(edgeinfer: CommandLine, url: str, tmp_path: Path) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 8}
    lines = [{"custom_id": name, "method": "POST", "url": CHAT, "body": body} for name in "abc"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    outcome = edgeinfer("batch", str(source), str(target), "--engine", "openai", "--base-url", url)
    assert (outcome.code, outcome.err) == (0, "edgeinfer: 3 lines completed, 0 with an error\n")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    expected = seeded().generate(HELLO, max_tokens=8, temperature=0.0).text
    assert {row["custom_id"] for row in rows} == set("abc")
    assert {row["response"]["body"]["choices"][0]["message"]["content"] for row in rows} == {expected}


def test_a_batch_ends_with_the_server_and_continues_later(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer_tui.commands.batch_command.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("edgeinfer_tui.commands.batch_command.IN_PROGRESS", 1)
    lines = [{"custom_id": name, "method": "POST", "url": CHAT, "body": {"messages": []}} for name in "ab"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    busy, good = Reply({"error": {"message": "busy"}}, 503), Reply({"choices": []})
    with scripted_server({MODELS: listing("m"), CHAT: [busy, good, busy]}) as server:
        command = ("batch", str(source), str(target), "--engine", "openai", "--base-url", server.address)
        outcome = edgeinfer(*command)
        assert outcome.code == 1
        assert outcome.err == f"edgeinfer: {server.address}/v1/chat/completions: 503, 5 times\n"
        assert server.bodies[0]["model"] == "m"
        server.replies[CHAT] = [good]
        assert edgeinfer(*command).err == (
            "edgeinfer: 1 lines completed, 0 with an error, 1 were done before\n"
        )
    assert [json.loads(line)["custom_id"] for line in target.read_text().splitlines()] == ["a", "b"]
