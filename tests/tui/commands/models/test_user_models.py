"""Entries of a user's models.toml, and what `list` shows of models and their use."""

import json
import os
from pathlib import Path

import pytest

from tests.tui.conftest import CommandLine


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's models.toml, with one entry whose file exists, one whose file doesn't."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = tmp_path / "config" / "edgeinfer" / "models.toml"
    file.parent.mkdir(parents=True)
    (tmp_path / "mine.gguf").write_bytes(b"no model")
    tables = {"mine": f"{tmp_path}/mine.gguf", "lost": f"{tmp_path}/lost.gguf", "short": "s.gguf"}
    file.write_text("".join(f"[{name}]\nfile = '{path}'\n" for name, path in tables.items()))
    return file


def test_a_user_entry_is_not_built_in(edgeinfer: CommandLine, own: Path, tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(edgeinfer("list", "--json").out)}
    assert rows["mine"]["source"] == "models.toml"
    assert rows["tiny"]["source"] == "built in"
    assert "lost" not in rows
    outcome = edgeinfer("rm", "mine", "--yes")
    assert outcome.code == 1
    assert "remove it yourself" in outcome.err
    assert (tmp_path / "mine.gguf").exists()


def test_a_missing_file_of_a_user_entry_is_named_with_the_entry(
    edgeinfer: CommandLine, own: Path, tmp_path: Path
) -> None:
    assert edgeinfer("show", "lost").err == (
        f"edgeinfer: lost: {tmp_path / 'lost.gguf'}: no such file; put it there, or change the entry in "
        f"{own}\n"
    )
    folder = tmp_path / "data" / "edgeinfer" / "models"
    assert f"short: {folder / 's.gguf'}: no such file;" in edgeinfer("show", "short").err


def test_last_used_is_the_time_of_loading(edgeinfer: CommandLine, own: Path, tmp_path: Path) -> None:
    os.utime(tmp_path / "mine.gguf", (10**9, 10**9))
    line = next(line for line in edgeinfer("list").out.splitlines() if line.startswith("mine "))
    assert "never" in line
    assert {row["name"]: row["last_used"] for row in json.loads(edgeinfer("list", "--json").out)}[
        "mine"
    ] is None
    from edgeinfer.registry.registry import find_model

    find_model("mine").record_use()
    line = next(line for line in edgeinfer("list").out.splitlines() if line.startswith("mine "))
    assert "now" in line


# Removing models.


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = tmp_path / "data" / "edgeinfer" / "models" / "mine.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no model")
    return file


def on_terminal(monkeypatch: pytest.MonkeyPatch, *completions: str) -> None:
    """As if a person typed these responses at the terminal."""
    lines = iter([*(f"{response}\n" for response in completions), ""])
    monkeypatch.setattr("edgeinfer_tui.confirmation.on_terminal", lambda stream: True)
    monkeypatch.setattr("sys.stdin", type("Typed", (), {"readline": lambda self: next(lines)})())


@pytest.mark.parametrize("completions", [(), ("",), ("n",), ("what?", "no")])
def test_removing_on_a_terminal_prompts_with_default_no(
    edgeinfer: CommandLine, pulled: Path, monkeypatch: pytest.MonkeyPatch, completions: tuple[str, ...]
) -> None:
    on_terminal(monkeypatch, *completions)
    outcome = edgeinfer("rm", "mine")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith("Remove mine, 8 B? [y/N] ")
    assert outcome.err.endswith("edgeinfer: mine: kept\n")
    assert pulled.exists()


def test_removing_proceeds_after_yes(
    edgeinfer: CommandLine, pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch, "Yes")
    assert edgeinfer("rm", "mine").out == f"{pulled}\n"
    assert not pulled.exists()


@pytest.mark.parametrize("option", ["--yes", "-y", "--dry-run"])
def test_yes_and_a_dry_run_do_not_prompt(
    edgeinfer: CommandLine, pulled: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    on_terminal(monkeypatch)
    assert "[y/N]" not in edgeinfer("rm", "mine", option).err
    assert pulled.exists() is (option == "--dry-run")


def test_a_script_gets_no_prompt(edgeinfer: CommandLine, pulled: Path) -> None:
    assert edgeinfer("rm", "mine").code == 0
    assert not pulled.exists()


def test_deleting_a_chat_prompts_too(edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.history.store import ChatStore

    with ChatStore() as store:
        store.add_message(store.new_chat("tiny").id, None, "user", "Hi")
    on_terminal(monkeypatch, "n")
    outcome = edgeinfer("history", "1", "--delete")
    assert outcome.err == "Delete chat 1, 1 messages: Hi? [y/N] edgeinfer: 1: kept\n"
    assert edgeinfer("history", "1", "--delete", "--yes").err == "edgeinfer: 1: deleted, 1 messages\n"


# Exit codes, as grep has them.


def test_a_search_that_finds_nothing_exits_with_1(edgeinfer: CommandLine) -> None:
    from edgeinfer.history.store import ChatStore

    with ChatStore() as store:
        store.add_message(store.new_chat("tiny").id, None, "user", "Of foxes")
    assert edgeinfer("history", "--search", "fox").code == 0
    assert edgeinfer("history", "--search", "bear").code == 1


def test_config_exits_with_1_on_invalid_settings(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edgeinfer("config").code == 0
    monkeypatch.setenv("EDGEINFER_CONTXT", "1")
    assert edgeinfer("config").code == 1


@pytest.mark.slow
def test_list_and_plan_predict_the_same_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.planning import fit
    from edgeinfer.planning.fit import known_machine
    from edgeinfer.planning.model_plan import plan_model
    from edgeinfer.registry.model_listing import listed
    from edgeinfer.registry.registry import find_model
    from edgeinfer_offload.machine import measure, this_machine
    from edgeinfer_offload.machine.measured_figures import MeasuredFigures

    figures = MeasuredFigures(tmp_path, "figures that no other process replaces")
    for module in (fit, measure, this_machine):
        monkeypatch.setattr(module, "stored_figures", lambda _: figures)
    planned = plan_model("tiny", draft=None).plan
    result = listed(find_model("tiny"), known_machine()).fit
    assert result is not None
    if planned.machine.graphics is None:
        assert result.tokens_per_second == pytest.approx(
            planned.prediction.decode_tokens_per_second, rel=1e-6
        )
