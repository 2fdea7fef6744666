"""One flag, one meaning: the same in every command, and llama.cpp's where it has one."""

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from edgeinfer.registry.near_names import nearest
from edgeinfer_tui.command_class import REFUSED
from edgeinfer_tui.command_list import app
from edgeinfer_tui.options.command_options import MAX_LISTED, command_options
from edgeinfer_tui.options.option_errors import ALIASES
from tests.tui.commands.test_run import pipe_in
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import FakeModel


@pytest.fixture(autouse=True)
def _empty_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"")


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

LLAMA_CPP = {
    "-t": "threads",
    "-c": "context",
    "-p": "prompt_option",
    "-f": "prompt_file",
    "-s": "seed",
    "-v": "verbose",
    "--threads": "threads",
    "--seed": "seed",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--repeat-penalty": "repeat_penalty",
    "--repeat-last-n": "repeat_last_n",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
    "--prompt": "prompt_option",
    "--file": "prompt_file",
    "--host": "host",
    "--port": "port",
}
"""Flag of llama.cpp -> the parameter that has its meaning here."""

TAKEN_BY = {
    "threads": {
        "run", "chat", "serve", "batch", "plan", "bench", "eval", "profile", "quantize", "convert",
        "doctor", "embed", "rank",
    },
    "lora": {"run", "chat", "serve", "batch", "plan", "bench", "eval", "embed", "rank"},
    "context": {"run", "chat", "serve", "batch", "plan", "eval", "embed", "rank"},
    "max_tokens": {"run", "chat", "bench"},
    "seed": {"run", "chat", "bench"},
    "temperature": {"run", "chat"},
    "top_k": {"run", "chat"},
    "min_p": {"run", "chat"},
    "mirostat": {"run", "chat"},
    "vram": {"run", "chat", "serve", "batch", "plan", "embed", "rank", "bench"},
}  # fmt: skip


def options() -> Iterator[tuple[str, Any]]:
    """Command and option, of all commands."""
    for command, spec in COMMANDS.items():
        for param in spec.params:
            if param.param_type_name == "option":
                yield command, param


def meaning(name: str) -> str:
    """A parameter's name; a trailing underscore avoids a Python keyword."""
    return name.rstrip("_")


def test_a_flag_means_one_thing_in_every_command() -> None:
    meanings, flags = defaultdict(set), defaultdict(set)
    for _, param in options():
        given = (*param.opts, *param.secondary_opts)
        flags[meaning(param.name)].add(given)
        for flag in given:
            meanings[flag].add(meaning(param.name))
    assert {flag: names for flag, names in meanings.items() if len(names) > 1} == {}
    # One meaning has the same flags in every command, too.
    assert {name: given for name, given in flags.items() if len(given) > 1} == {}


def test_flags_of_llama_cpp_have_its_meaning() -> None:
    result = {flag: meaning(param.name) for _, param in options() for flag in param.opts}
    assert {flag: result.get(flag) for flag in LLAMA_CPP} == LLAMA_CPP


@pytest.mark.parametrize(("name", "commands"), TAKEN_BY.items(), ids=list(TAKEN_BY))
def test_an_option_is_accepted_by_every_applicable_command(name: str, commands: set[str]) -> None:
    assert {command for command, param in options() if param.name == name} == commands


def test_aliases_map_to_options_and_hide_none() -> None:
    flags = {flag for _, param in options() for flag in param.opts}
    assert {name for name in ALIASES.values() if f"--{name}" not in flags} == set()
    assert {alias for alias in ALIASES if f"--{alias}" in flags} == set()


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("--temp=0.5", "temperature", 0.5),
        ("--n-predict=7", "max_tokens", 7),
        ("--predict=7", "max_tokens", 7),
        ("-s=7", "seed", None),
        ("-s3", "seed", 3),
        ("--typical=0.9", "typical_p", 0.9),
        ("--mirostat-lr=0.2", "mirostat_eta", 0.2),
    ],
)
def test_aliases_reach_the_model(
    edgeinfer: CommandLine, fake: FakeModel, given: str, name: str, value: float | None
) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", given)
    if value is None:
        assert outcome.code == 2
    else:
        assert fake.settings == [{name: value}]


def test_t_is_threads_and_c_is_context(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "-t", "2", "-c", "99").code == 0
    assert fake.loaded_with == {"model": "tiny", "threads": 2, "context": 99}
    assert fake.settings == [{}]
    edgeinfer("run", "tiny", "Hi", "--ctx-size", "77")
    assert fake.loaded_with == {"model": "tiny", "context": 77}


def test_t_99_is_an_invalid_thread_count(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "-t", "99")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("edgeinfer: --threads: saw 99, wanted ")


def test_minus_one_is_no_limit_and_a_random_seed(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "--max-tokens", "-1", "--seed", "-1").code == 0
    assert fake.settings == [{}]
    assert edgeinfer("run", "tiny", "Hi", "--max-tokens", "-2").code == 2


def help_flag(command: str) -> str:
    """The flag that lists all options of a command."""
    return "--help-all" if len(command_options(command)) > MAX_LISTED else "--help"


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("command", ["run", "chat", "serve", "plan", "bench", "eval", "list"])
@pytest.mark.parametrize(
    "given", [["-ngl", "99"], ["--n-cpu-moe=3"], ["-ot", "exps=CPU"], ["--n-gpu-layers", "9"]]
)
def test_manual_placement_gives_a_one_line_error(
    edgeinfer: CommandLine, command: str, given: list[str]
) -> None:
    outcome = edgeinfer(command, *given)
    assert (outcome.code, outcome.out) == (2, "")
    flag = given[0].partition("=")[0]
    assert outcome.err == (
        f"edgeinfer: {flag}: edgeinfer plans what goes to the GPU, see edgeinfer plan; limit its memory "
        f"with --vram SIZE (see edgeinfer {command} {help_flag(command)})\n"
    )


def test_every_refused_flag_names_the_alternative(edgeinfer: CommandLine) -> None:
    for flag, explanation in REFUSED.items():
        outcome = edgeinfer("run", flag)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1), flag
        assert explanation in outcome.err, flag


def test_a_refused_flag_may_be_a_value(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "--stop", "-ngl", "--temp", "0").code == 0
    assert fake.settings == [{"stop": ("-ngl",), "temperature": 0.0}]
    assert edgeinfer("run", "tiny", "--", "-ngl").code == 0
    assert fake.prompts[-1].endswith("-ngl")


def test_the_prompt_may_be_an_option_or_a_file(
    edgeinfer: CommandLine, fake: FakeModel, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("From a file.\n", encoding="utf-8")
    edgeinfer("run", "tiny", "-p", "Hello")
    edgeinfer("run", "tiny", "--file", str(tmp_path / "prompt.txt"))
    assert [user_message.removeprefix("raw ") for user_message in fake.prompts] == ["Hello", "From a file."]
    outcome = edgeinfer("run", "tiny", "Hi", "-p", "Hello")
    assert (outcome.code, outcome.out) == (2, "")
    assert "PROMPT and --prompt both give the prompt; drop one" in outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="no endless device there")
@pytest.mark.parametrize("option", ["--file", "--json-schema", "--grammar", "--chat-template"])
def test_an_endless_file_is_refused(edgeinfer: CommandLine, fake: FakeModel, option: str) -> None:
    outcome = edgeinfer("run", "tiny", option, "/dev/zero", *([] if option == "--file" else ["Hi"]))
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert f"{option} /dev/zero: saw more than 64.0 MiB, wanted a text of that size at most" in outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="no endless device there")
def test_an_endless_text_to_evaluate_is_refused(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("eval", "tiny", "--text", "/dev/zero")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--text /dev/zero: saw more than 64.0 MiB" in outcome.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_read(edgeinfer: CommandLine, fake: FakeModel, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"From a pipe.",), daemon=True)
    writer.start()
    assert edgeinfer("run", "tiny", "--file", str(pipe)).code == 0
    writer.join()
    assert fake.prompts == ["raw From a pipe."]


@pytest.mark.skipif(sys.platform == "win32", reason="no endless device there")
@pytest.mark.parametrize("arguments", [[], ["--batch"]])
def test_endless_standard_input_is_refused(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        outcome = edgeinfer("run", "tiny", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "saw more than 64.0 MiB" in outcome.err


# Help and suggestions.


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_shows_no_type_for_a_flag(edgeinfer: CommandLine, command: str) -> None:
    outcome = edgeinfer(*filter(None, [command]), "--help")
    assert outcome.code == 0
    assert "bool" not in outcome.out.lower()


@pytest.mark.parametrize(
    ("command", "wrong", "meant"),
    [
        ("run", "--temperatur", "--temperature"),
        ("run", "--top", "--top-k or --top-p or --top-n-sigma"),
        ("run", "--temprature", "--temperature"),
        ("run", "--ctx", "--context"),
        ("bench", "-p", "--prompt-tokens"),
        ("serve", "--api", "--key"),
        ("plan", "--vrm", "--vram"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(
    edgeinfer: CommandLine, command: str, wrong: str, meant: str
) -> None:
    outcome = edgeinfer(command, wrong, "1")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"edgeinfer: No such option: {wrong}; did you mean {meant}? "
        f"(see edgeinfer {command} {help_flag(command)})\n"
    )


def test_nearest_prefers_beginnings_and_ignores_punctuation() -> None:
    models = ["tiny", "qwen3-8b", "qwen3-4b", "qwen3-14b", "llama-3.2-3b"]
    assert nearest("qwen38b", models) == ["qwen3-8b"]
    assert nearest("QWEN3", models) == ["qwen3-8b", "qwen3-4b", "qwen3-14b"]
    assert nearest("tinny", models) == ["tiny"]
    assert nearest("zzzz", models) == []
    assert nearest("", models) == []
    assert nearest("x" * 1_000_000, models) == []


def test_a_misspelled_model_or_file_suggests_the_nearest(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "; did you mean qwen3-8b?" in edgeinfer("plan", "qwen38b").err
    (tmp_path / "tinyllama.gguf").touch()
    assert f"did you mean {tmp_path / 'tinyllama.gguf'}?" in edgeinfer("plan", str(tmp_path / "t")).err
    monkeypatch.chdir(tmp_path)
    wanted = f"edgeinfer: ./t: no such file; did you mean .{os.sep}tinyllama.gguf?\n"
    assert edgeinfer("plan", "./t").err == wanted


@pytest.mark.parametrize(
    "words", [["history", "--search", "\udcff"], ["run", "tiny", "a\udcff"], ["show", "\udcff"]]
)
def test_an_undecodable_value_is_refused(edgeinfer: CommandLine, words: list[str]) -> None:
    outcome = edgeinfer(*words)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "\\udcff', wanted a text in UTF-8" in outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="file names are Unicode there")
def test_an_undecodable_file_name_is_a_valid_path(edgeinfer: CommandLine, tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/\xff.gguf"
    with open(file, "wb") as stream:
        stream.write(b"no model")
    outcome = edgeinfer("show", os.fsdecode(file))
    assert outcome.code == 1
    assert "UTF-8" not in outcome.err
