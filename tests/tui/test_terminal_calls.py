"""What differs between systems for a program in a terminal."""

import io
import os
from typing import BinaryIO, cast

import pytest

from edgeinfer_tui.system.terminal_calls import (
    allow_escape_sequences,
    console_encoding,
    has_display,
    has_input_within,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_pipes_of_windows_are_written_in_utf_8() -> None:
    assert console_encoding(io.StringIO(), "win32") == "utf-8"
    assert console_encoding(Terminal(), "win32") is None
    assert console_encoding(io.StringIO(), "linux") is None


def test_a_pipe_has_input_when_data_or_its_end_arrives() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        assert not has_input_within(cast(BinaryIO, pipe), 0.0)
        os.write(writing, b"x")
        assert has_input_within(cast(BinaryIO, pipe), 5.0)
        assert os.read(reading, 1) == b"x"
        os.close(writing)
        assert has_input_within(cast(BinaryIO, pipe), 5.0)


@pytest.mark.parametrize("name", ["DISPLAY", "WAYLAND_DISPLAY"])
def test_a_named_display_can_show_windows(name: str) -> None:
    assert has_display({name: ":0"})


def test_escape_sequences_are_allowed_without_an_error() -> None:
    allow_escape_sequences()
