"""Drawing on a terminal that is closed, or slow."""

import io
import os
import sys
from typing import IO, TextIO, cast

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import pty

from edgeinfer_tui.app.disconnect_safe_driver import TerminalFile


def test_output_to_a_closed_terminal_is_dropped() -> None:
    window, terminal = pty.openpty()
    file = os.fdopen(terminal, "w")
    screen = TerminalFile(file)
    screen.write("seen")
    screen.flush()
    assert os.read(window, 16) == b"seen"
    os.close(window)
    for _ in range(3):
        assert screen.write("x" * 20_000) == 20_000
        screen.flush()
    file.write("behind all of it")
    file.close()  # as Python does at exit: an error here would be its exit code


class SlowOnce(io.TextIOBase):
    """A terminal whose first write would block."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.is_first = file, True

    def write(self, text: str) -> int:
        if self.is_first:
            self.is_first = False
            raise BlockingIOError
        return self.file.write(text)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


def test_a_slow_terminal_is_not_treated_as_closed() -> None:
    window, terminal = pty.openpty()
    file = os.fdopen(terminal, "w")
    screen, number = TerminalFile(cast(IO[str], SlowOnce(file))), file.fileno()
    assert screen.write("lost") == 4
    assert os.isatty(number)
    screen.write("still")
    screen.flush()
    assert os.read(window, 16) == b"still"
    file.close()
    os.close(window)
