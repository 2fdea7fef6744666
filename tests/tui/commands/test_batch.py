"""`run` for scripts: one prompt per line, responses as JSON, exit codes."""

import json

import pytest

from tests.tui.commands.test_run import pipe_in
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import ANSWER, FakeModel


@pytest.fixture(autouse=True)
def _empty_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"")


def records(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_json_response_includes_its_timing(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "--output", "json", "--speed")
    (result,) = records(outcome.out)
    assert (result["model"], result["prompt"], result["text"]) == ("fake", "Hi", ANSWER)
    assert result["finish_reason"] == "stop"
    assert result["usage"] == {
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "generated_tokens": len(ANSWER.split()),
    }
    assert set(result["timings"]) >= {"seconds_to_first_token", "decode_tokens_per_second"}  # type: ignore[call-overload]
    assert (outcome.code, outcome.err) == (0, "")


def test_each_line_of_the_input_is_a_prompt(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "Ein Mädchen\r\n\n  \nAnd a fox".encode())
    assert edgeinfer("run", "tiny", "--batch").out == f"{ANSWER}\n" * 2
    assert fake.prompts == ["raw Ein Mädchen", "raw And a fox"]
    pipe_in(monkeypatch, b"A fox\nA bear\n")
    outcome = edgeinfer("run", "tiny", "Describe it.", "--batch", "--output", "json")
    assert [result["prompt"] for result in records(outcome.out)] == [
        "A fox\n\nDescribe it.",
        "A bear\n\nDescribe it.",
    ]


def test_a_failed_line_is_reported_and_the_next_one_runs(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"A fox\noverflow\nA bear\n")
    outcome = edgeinfer("run", "tiny", "--batch", "--output", "json")
    assert [result["prompt"] for result in records(outcome.out)] == ["A fox", "overflow", "A bear"]
    assert records(outcome.out)[1]["error"] == "prompt: 2000 tokens, wanted at most 1024"
    assert (outcome.code, outcome.err) == (1, "edgeinfer: prompt: 2000 tokens, wanted at most 1024\n")
    pipe_in(monkeypatch, b"overflow\nA bear\n")
    assert edgeinfer("run", "tiny", "--batch").out == f"{ANSWER}\n"


def test_empty_input_gives_no_responses(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"\n")
    outcome = edgeinfer("run", "tiny", "--batch")
    assert (outcome.code, outcome.out, fake.prompts) == (0, "", [])


def test_an_undecodable_line_is_named_after_earlier_responses(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"good\nb\xffd\n")
    outcome = edgeinfer("run", "tiny", "--batch")
    assert (outcome.code, outcome.out) == (2, f"{ANSWER}\n")
    assert "standard input, line 2: byte 1 isn't UTF-8, wanted a text" in outcome.err


def test_batch_and_chat_exclude_each_other(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "--batch", "--session", "x")
    assert outcome.code == 2
    assert "--session and --continue continue one chat, --batch has many" in outcome.err


def test_several_responses_are_several_records(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "-n", "2", "--output", "json")
    assert len(records(outcome.out)) == 2


def test_an_unknown_output_is_refused(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "--output", "xml").code == 2


def test_repeated_lines_are_completed_once_with_a_response_cache(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"A fox\nA bear\nA fox\n"
    pipe_in(monkeypatch, lines)
    options = ("--batch", "--temperature", "0", "--output", "json")
    results = records(edgeinfer("run", "tiny", *options, "--response-cache", "8").out)
    assert fake.prompts == ["raw A fox", "raw A bear"]
    assert [(result["prompt"], result["text"]) for result in results] == [
        ("A fox", ANSWER),
        ("A bear", ANSWER),
        ("A fox", ANSWER),
    ]
    assert [result["usage"]["cached_tokens"] for result in results] == [0, 0, 9]  # type: ignore[index]
    for repeated in (options, ("--batch", "--response-cache", "8")):
        fake.prompts.clear()
        pipe_in(monkeypatch, lines)
        edgeinfer("run", "tiny", *repeated)
        assert len(fake.prompts) == 3
