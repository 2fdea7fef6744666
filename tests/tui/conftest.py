"""A command line with a fake model."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edgeinfer_tui import library
from edgeinfer_tui.command_line import exit_code
from tests.tui.fake_library import FakeModel


@dataclass(frozen=True)
class Outcome:
    """The result of a command line."""

    code: int
    out: str
    err: str


if TYPE_CHECKING:
    # Windows has no pseudo-terminals.
    from tests.tui.terminal import Terminal

CommandLine = Callable[..., Outcome]


@pytest.fixture
def edgeinfer(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `edgeinfer` with the arguments given, in this process."""

    def run(*arguments: str) -> Outcome:
        code = exit_code(list(arguments))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """The model that `run` loads."""
    model = FakeModel()

    def load(name: str | None, settings: dict[str, Any], *progress: Callable[[int, int], None]) -> FakeModel:
        model.loaded_with = {"model": name, **settings}
        return model

    monkeypatch.setattr(library, "load_model", load)
    return model


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    return tmp_path


@pytest.fixture
def opened() -> Iterator[list["Terminal"]]:
    """Terminals to be closed at the end."""
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user who runs the tests may have settings and chats."""
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
