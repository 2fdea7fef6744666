"""The chat on a real terminal: a separate process, colors, signals, exit."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeinfer.history.store import ChatStore

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import termios

from tests.tui.terminal import Terminal

pytestmark = pytest.mark.slow

LEFT_ALTERNATE_SCREEN = "\x1b[?1049l"
COLOR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:[34]8;|(?:3|4|9|10)[0-7](?=[;m]))")


@pytest.fixture
def begin(home: Path) -> Iterator[Callable[..., Terminal]]:
    """Open the chat and send a message; responses of the fake model are long and slow."""
    terminals: list[Terminal] = []

    def open_terminal(*arguments: str, variables: dict[str, str] | None = None) -> Terminal:
        terminal = Terminal(home, "chat", *arguments, variables=variables)
        terminals.append(terminal)
        termios.tcsetwinsize(terminal.slave, (24, 80))
        terminal.wait_for("F1 help")
        return terminal

    yield open_terminal
    for terminal in terminals:
        terminal.close()


def during_response(begin: Callable[..., Terminal]) -> Terminal:
    terminal = begin()
    terminal.type("Hello\r")
    terminal.wait_for("word word word")
    return terminal


def stored_texts(home: Path) -> tuple[str, str]:
    with ChatStore(home / ".local/state/edgeinfer/chats.sqlite") as store:
        response = store.branch(store.chats(1)[0])[1]
    return response.text, response.state


def test_quitting_during_a_response_keeps_its_text_and_restores_the_terminal(
    home: Path, begin: Callable[..., Terminal]
) -> None:
    terminal = during_response(begin)
    terminal.type("\x11")
    assert terminal.exit_code() == 0
    assert LEFT_ALTERNATE_SCREEN in terminal.seen
    assert "Traceback" not in terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.before
    text, state = stored_texts(home)
    assert text.startswith("word word word")
    assert state == "stopped"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_it_like_quitting(home: Path, begin: Callable[..., Terminal], name: str) -> None:
    terminal = during_response(begin)
    terminal.process.send_signal(getattr(signal, name))
    assert terminal.exit_code() == 0
    assert LEFT_ALTERNATE_SCREEN in terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert stored_texts(home)[1] == "stopped"


def test_closing_the_terminal_during_a_response_keeps_its_text(
    home: Path, begin: Callable[..., Terminal]
) -> None:
    terminal = during_response(begin)
    assert terminal.hang_up() == 0
    assert stored_texts(home)[1] == "stopped"


def test_after_kill_9_all_shown_text_is_saved(home: Path, begin: Callable[..., Terminal]) -> None:
    terminal = begin()
    terminal.type("Hello\r")
    for _ in range(5):
        terminal.wait_for("word word word")
    terminal.process.kill()
    terminal.process.wait()
    text, state = stored_texts(home)
    assert text.startswith("word word word")
    assert state == "coming"


@pytest.mark.slow
def test_no_color_is_supported(home: Path, begin: Callable[..., Terminal]) -> None:
    terminal = begin(variables={"NO_COLOR": "1", "COLORTERM": "truecolor"})
    terminal.type("\x11")
    assert terminal.exit_code() == 0
    assert COLOR.search(terminal.seen) is None
    colored = begin(variables={"COLORTERM": "truecolor"})
    colored.type("\x11")
    assert colored.exit_code() == 0
    assert COLOR.search(colored.seen) is not None


def test_an_invalid_model_gives_a_one_line_error_before_drawing(home: Path) -> None:
    terminal = Terminal(home, "chat", "no-such-model")
    try:
        assert terminal.exit_code() == 1
        assert terminal.seen.startswith("edgeinfer: no-such-model:")
        assert "\x1b[?1049h" not in terminal.seen
    finally:
        terminal.close()


def test_invalid_utf8_input_does_not_stop_the_keyboard(home: Path, begin: Callable[..., Terminal]) -> None:
    terminal = begin()
    os.write(terminal.master, b"\xff\x80a\xc3\x28\x1b[200~pasted \xfe text\x1b[201~")
    terminal.wait_for("pasted")
    terminal.type("Hello\r")
    terminal.wait_for("word word word")
    terminal.type("\x11")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
