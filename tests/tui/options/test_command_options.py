"""The options of the commands derive from the fields of the option classes."""

import re

import pytest

from edgeinfer.options.option_field import options_of
from edgeinfer_tui.options.command_options import CLASSES, command_options
from edgeinfer_tui.options.settings import setting_names
from tests.tui.conftest import CommandLine

COMMANDS = (
    "run", "chat", "serve", "batch", "plan", "bench", "eval", "profile", "quantize", "convert", "doctor",
    "pull", "embed", "rank",
)  # fmt: skip


def test_every_command_of_an_option_exists_and_every_name_is_used_once() -> None:
    for kind in CLASSES:
        for name, info in options_of(kind).items():
            assert set(info.commands.split()) <= set(COMMANDS), name
    for command in COMMANDS:
        names = [
            name
            for kind in CLASSES
            for name, info in options_of(kind).items()
            if command in info.commands.split()
        ]
        assert len(names) == len(set(names)) == len(command_options(command))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("temperature", "[dim](0.8)[/]"),
        ("repeat_penalty", "[dim](1.0: off)[/]"),
        ("dry_sequence_breakers", '[dim](\\n : " *)[/]'),
        ("n", "[dim](1)[/]"),
        ("stop", "May be repeated."),
    ],
)
def test_help_ends_with_the_default(name: str, end: str) -> None:
    option = command_options("run")[name].annotation().__metadata__[0]
    assert option.help.endswith(end)


def test_settings_are_the_persistent_options_of_run() -> None:
    names = setting_names()
    assert {"model", "context", "temperature", "context_overflow", "n", "system", "speed"} <= set(names)
    assert not {"stop", "raw", "session", "schema", "lookup_files", "logit_bias", "prompt_file"} & set(names)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_help_lists_the_common_options_and_help_all_all_of_them(
    command: str, edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcomes = [edgeinfer(command, flag) for flag in ("--help", "--help-all", "--help")]
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    short, whole, again = (
        set(re.findall(r"^(?:.|  ?-[a-z],?) +(--[a-z-]+)", one.out, re.MULTILINE)) for one in outcomes
    )
    flags = {name: one.flags[0].partition("/")[0] for name, one in command_options(command).items()}
    common = {flags[name] for name, one in command_options(command).items() if one.info.common}
    assert whole == {*flags.values(), "--help", "--help-all"}
    assert short == again == {*common, "--help", "--help-all"}
    assert len(common) <= 12


def test_all_options_fit_a_narrow_terminal_with_their_whole_names(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = edgeinfer("run", "--help-all").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 170
    assert "  --assume-pre-tokenizer NAME" in lines
    assert "  --context-overflow stop|shift|h2o" in lines
    assert "  -c, --context N           Context size (num_ctx): maximum tokens of prompt and" in lines
    assert "…" not in "".join(lines)


def test_help_names_the_terms_that_users_of_other_programs_search_for(edgeinfer: CommandLine) -> None:
    text = " ".join(edgeinfer("run", "--help-all").out.replace("│", " ").split())
    for term in (
        "offload",
        "KV cache",
        "Speculative decoding",
        "Nucleus",
        "greedy",
        "MoE",
        "mmap",
        "num_ctx",
    ):
        assert term in text
