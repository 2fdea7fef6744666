"""Persistent settings: the file, the environment, and their precedence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer_tui.options.settings import setting_names
from tests.tui.commands.test_run import pipe_in
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import FakeModel
from tests.tui.terminal import ROOT, environment


@pytest.fixture(autouse=True)
def _empty_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file, which doesn't exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edgeinfer").mkdir()
    return tmp_path / "edgeinfer" / "config.toml"


def write(file: Path, *lines: str) -> None:
    file.write_text("\n".join(lines), encoding="utf-8")


def test_the_settings_file_applies_without_other_sources(
    edgeinfer: CommandLine, fake: FakeModel, file: Path
) -> None:
    write(file, "context = 512", "max-tokens = 7", "kv = 'f32'", "vram = 1000", "repack = false")
    assert edgeinfer("run", "tiny", "Hi").code == 0
    assert fake.loaded_with == {"model": "tiny", "context": 512, "kv": "f32", "vram": "1000", "repack": False}
    assert fake.settings == [{"max_tokens": 7}]


def test_the_command_line_overrides_the_environment_which_overrides_the_file(
    edgeinfer: CommandLine, fake: FakeModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, "context = 1", "top_k = 2", "temperature = 0.5", "repack = true")
    monkeypatch.setenv("EDGEINFER_CONTEXT", "3")
    monkeypatch.setenv("EDGEINFER_TOP_K", "4")
    edgeinfer("run", "tiny", "Hi", "--top-k", "0", "--no-repack")
    assert fake.loaded_with == {"model": "tiny", "context": 3, "repack": False}
    assert fake.settings == [{"top_k": 0, "temperature": 0.5}]


def test_the_model_can_be_a_setting(
    edgeinfer: CommandLine, fake: FakeModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_MODEL", "no-such-model")
    assert edgeinfer("plan").err.startswith("edgeinfer: no-such-model: no such model")
    assert edgeinfer("plan", "tiny", "--device", "cpu: 8GiB ram, 20GB/s ram").code == 0


def test_a_flag_can_be_a_setting(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_SPEED", "yes")
    assert "decode" in edgeinfer("run", "tiny", "Hi").err
    monkeypatch.setenv("EDGEINFER_SPEED", "off")
    assert "decode" not in edgeinfer("run", "tiny", "Hi").err


def test_settings_reach_the_plan(edgeinfer: CommandLine, file: Path) -> None:
    write(file, "device = 'cpu: 8GiB ram, 20GB/s ram'", "context = 77", "draft = 'none'", "kv = 'f32'")
    output = json.loads(edgeinfer("plan", "tiny", "--json").out)
    assert output["context"] == 77
    assert not [item for item in output["items"] if item["item"] == "draft model"]


WRONG = {
    "context = 'much'": "context: saw 'much', wanted a whole number",
    "context = true": "context: saw True, wanted a whole number",
    "temperature = 'hot'": "temperature: saw 'hot', wanted a number",
    "repack = 1": "repack: saw 1, wanted true or false",
    "kv = 'f8'": "kv: saw 'f8', wanted one of 'f32', 'f16', 'fp8', 'q8_0', 'q4_0', or two",
    "system = []": "system: saw [], wanted a text",
    "dry_sequence_breakers = [1]": "dry_sequence_breakers: saw [1], wanted a list of texts",
    "contxt = 1": "contxt: no such setting; did you mean context?",
    "zzzzzz = 1": "zzzzzz: no such setting; `edgeinfer config` lists them",
    "prompt = 'x'": "prompt: no such setting",
    "context =": "no TOML: ",
}


@pytest.mark.parametrize(("line", "message"), WRONG.items(), ids=list(WRONG))
def test_an_invalid_setting_gives_one_line_that_names_the_file(
    line: str, message: str, edgeinfer: CommandLine, fake: FakeModel, file: Path
) -> None:
    write(file, line)
    outcome = edgeinfer("run", "tiny", "Hi")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith(f"edgeinfer: {file}: {message}")


def test_an_invalid_environment_variable_is_named(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_CONTEXT", "much")
    for command in (("run", "tiny", "Hi"), ("plan",), ("serve",), ("config",)):
        outcome = edgeinfer(*command)
        assert outcome.code == 1
        assert outcome.err == "edgeinfer: EDGEINFER_CONTEXT: saw 'much', wanted a whole number\n"


def test_another_settings_file_can_be_selected(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_CONFIG", str(tmp_path / "own.toml"))
    assert edgeinfer("config", "--path").out == f"{tmp_path / 'own.toml'}\n"
    assert edgeinfer("config").err.startswith(f"edgeinfer: {tmp_path / 'own.toml'}: ")


def test_config_reports_every_value_and_its_source(
    edgeinfer: CommandLine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, "temperature = 0.2")
    monkeypatch.setenv("EDGEINFER_MAX_TOKENS", "9")
    monkeypatch.setenv("EDGEINFER_CONTXT", "1")
    outcome = edgeinfer("config")
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["temperature", "0.2", str(file)] in rows
    assert ["max_tokens", "9", "EDGEINFER_MAX_TOKENS"] in rows
    assert ["top_k", "40", "default"] in rows
    assert ["context", "default"] in rows
    assert outcome.err == "edgeinfer: EDGEINFER_CONTXT: no such setting; did you mean EDGEINFER_CONTEXT?\n"
    output = json.loads(edgeinfer("config", "--json").out)
    assert list(output["settings"]) == list(setting_names())
    assert output["settings"]["temperature"] == {"value": 0.2, "from": str(file)}
    assert output["settings"]["kv"] == {"value": "f16", "from": "default"}
    assert "models" in output["folders"]


def test_config_reports_valid_settings_despite_invalid_ones(edgeinfer: CommandLine, file: Path) -> None:
    write(file, "zzzzzz = 1\ntemperature = 0.2\ncontext = 'much'")
    outcome = edgeinfer("config")
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["temperature", "0.2", str(file)] in rows
    assert ["context", "default"] in rows
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        f"edgeinfer: {file}: zzzzzz: no such setting; `edgeinfer config` lists them",
        f"edgeinfer: {file}: context: saw 'much', wanted a whole number",
    ]


def test_config_works_without_settings(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("config")
    assert (outcome.code, outcome.err) == (0, "")
    assert "(not there)" in outcome.out


COMPLETIONS = {
    "edgeinfer pu": ["pull"],
    "edgeinfer run ti": ["tiny"],
    "edgeinfer pull llama-3.2": ["llama-3.2-1b", "llama-3.2-3b"],
    "edgeinfer run --dev": ["--device"],
}


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("typed", "offered"), COMPLETIONS.items(), ids=list(COMPLETIONS))
def test_the_shell_completes_commands_options_and_models(
    typed: str, offered: list[str], tmp_path: Path
) -> None:
    variables = {
        **environment(tmp_path),
        "_EDGEINFER_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()"],
        env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == offered, done.stderr
