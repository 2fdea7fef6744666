"""Terminal output: text without control characters, edgeinfer's escape sequences, whole words."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from edgeinfer_tui.failures import MAX_LINE, one_line, say
from edgeinfer_tui.output.columns import print_columns
from edgeinfer_tui.output.completion_output import print_completion, print_text
from edgeinfer_tui.output.progress_line import ERASE, ProgressLine
from edgeinfer_tui.output.terminal_output import OutputStream, control, guarded_output, help_output
from edgeinfer_tui.output.transfer_progress import TransferProgress
from edgeinfer_tui.output.word_wrap import WordWrap
from tests.tui.fake_library import FakeStream
from tests.tui.terminal import ROOT, Terminal, environment

if sys.platform != "win32":
    import pty
    import termios


ATTACK = "a\x1b[2J\x1b]0;title\x07\x9b31mb\x7f\rc"
HARMLESS_ATTACK = "a�[2J�]0;title��31mb��c"
PROGRAM = (sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()")


class FakeTerminal(io.StringIO):
    """A stream whose `isatty` returns True."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal_streams(
    monkeypatch: pytest.MonkeyPatch, terminal: bool = True
) -> Iterator[tuple[TextIO, TextIO]]:
    raw = (FakeTerminal(), FakeTerminal()) if terminal else (io.StringIO(), io.StringIO())
    monkeypatch.setattr(sys, "stdout", raw[0])
    monkeypatch.setattr(sys, "stderr", raw[1])
    with guarded_output():
        yield raw


def write_everything() -> None:
    """Every way in which the command line writes data."""
    print(ATTACK)
    print_text(ATTACK)
    print_columns(["NAME"], [[ATTACK]])
    print_completion(FakeStream([ATTACK, "\n"], prompt_tokens=1), ProgressLine("", sys.stderr))
    say(ATTACK)
    with TransferProgress(sys.stderr) as progress:
        progress.say(ATTACK)


def test_data_on_a_terminal_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_streams(monkeypatch) as (out, err):
        write_everything()
    assert out.getvalue() == f"{HARMLESS_ATTACK}\n" * 2 + f"NAME\n{HARMLESS_ATTACK}\n{HARMLESS_ATTACK}\n"  # type: ignore[attr-defined]
    assert err.getvalue() == f"edgeinfer: {HARMLESS_ATTACK}\n" * 2  # type: ignore[attr-defined]


def test_piped_data_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_streams(monkeypatch, terminal=False) as (out, err):
        write_everything()
    assert out.getvalue() == f"{ATTACK}\n" * 2 + f"NAME\n{ATTACK}\n{ATTACK}\n"  # type: ignore[attr-defined]
    assert err.getvalue() == f"edgeinfer: {ATTACK}\n" * 2  # type: ignore[attr-defined]


def test_escape_sequences_of_edgeinfer_reach_a_terminal_and_those_of_data_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal_streams(monkeypatch) as (out, err):
        control(sys.stderr, ERASE)
        print("\x1b[31mdata", file=sys.stderr)
        with help_output():
            print("\x1b[1mhelp\x1b[0m")
        print("\x1b[1mdata")
    assert err.getvalue() == f"{ERASE}�[31mdata\n"  # type: ignore[attr-defined]
    assert out.getvalue() == "\x1b[1mhelp\x1b[0m\n�[1mdata\n"  # type: ignore[attr-defined]


def test_escape_sequences_are_not_written_to_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal_streams(monkeypatch, terminal=False) as (_, err):
        control(sys.stderr, ERASE)
    assert err.getvalue() == ""  # type: ignore[attr-defined]


def test_the_streams_are_restored_afterwards() -> None:
    before = sys.stdout, sys.stderr
    with guarded_output():
        assert isinstance(sys.stdout, OutputStream)
    assert (sys.stdout, sys.stderr) == before


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert one_line(OSError(errno.ENOENT, "No such file", "a\nb")) == "a b: No such file"
    assert len(one_line(OSError("x" * 100_000))) == MAX_LINE


@pytest.mark.slow
def test_help_has_colors_on_a_terminal(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "rm", "--help", command=PROGRAM)
    opened.append(terminal)
    assert terminal.exit_code() == 0
    assert "\x1b[1m" in terminal.seen
    assert "�" not in terminal.seen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="file names have no control characters there")
def test_a_file_name_cannot_control_the_terminal(home: Path, opened: list[Terminal]) -> None:
    name = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b1m.gguf"
    (home / name).write_bytes(b"no model")
    for arguments in (["show", str(home / name)], ["list", str(home / name)], ["history", str(home / name)]):
        terminal = Terminal(home, *arguments, command=PROGRAM)
        opened.append(terminal)
        assert terminal.exit_code() in (1, 2)
        assert "\x1b" not in terminal.seen
        assert "\x9b" not in terminal.seen


# Closed streams and full disks.


def closed(tmp_path: Path, redirection: str, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command line run by a shell with a redirection."""
    words = " ".join(f'"{word}"' for word in arguments)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "{PROGRAM[2]}" {words} {redirection}', sys.executable],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "EDGEINFER_DEBUG": ""},
        cwd=ROOT,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 1, "edgeinfer: standard output is closed; wanted a terminal, a file or a pipe\n"),
        ("2>&-", 0, ""),
        ("<&-", 0, ""),
        (">/dev/full", 1, "edgeinfer: No space left on device\n"),
        (">/dev/full 2>/dev/full", 1, ""),
        (">&- 2>&-", 1, ""),
        ("<&- >&- 2>&-", 1, ""),
    ],
)
def test_closed_and_full_streams(tmp_path: Path, redirection: str, code: int, message: str) -> None:
    assert closed(tmp_path, redirection, "config", "--path") == (code, message)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_errors_with_closed_streams_keep_their_exit_code(tmp_path: Path) -> None:
    assert closed(tmp_path, "2>&-", "show", "no-such-model") == (1, "")
    assert closed(tmp_path, ">&- 2>&-", "show", "--no-such-option") == (2, "")
    assert closed(tmp_path, ">&-", "rm", "no-such-model")[0] == 1


@pytest.mark.slow
def test_a_closed_stderr_reader_does_not_end_the_program(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, "plan", "--device", "cpu", "--no-such"],
        stderr=writing,
        stdout=subprocess.PIPE,
        env=environment(tmp_path),
        cwd=ROOT,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 2


# Words.


@contextmanager
def narrow_terminal(columns: int) -> Iterator[TextIO]:
    """A stream on a pseudo-terminal of this many columns; `written` afterwards."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    with os.fdopen(slave, "w", closefd=True) as stream:
        yield stream
    os.close(master)


def shown(pieces: list[str], columns: int, column: int = 0) -> list[str]:
    """The lines that a terminal shows after the pieces; it supports newline, cursor back and erase."""
    with narrow_terminal(columns) as sized:
        screen = FakeTerminal()
        screen.fileno = sized.fileno  # type: ignore[method-assign]
        wrap = WordWrap(screen, column)
        for piece in pieces:
            wrap.write(piece)
    lines = [""]
    rest = screen.getvalue()
    while rest:
        if rest.startswith("\x1b["):
            count, rest = rest[2:].split("D", 1)
            lines[-1] = lines[-1][: len(lines[-1]) - int(count)]
            rest = rest.removeprefix("\x1b[K")
        elif rest[0] == "\n":
            lines.append("")
            rest = rest[1:]
        else:
            lines[-1] += rest[0]
            rest = rest[1:]
    return lines


def test_streamed_text_wraps_between_words_for_any_pieces() -> None:
    text = "The quick brown fox jumps over the lazy dog and runs."
    expected = ["The quick brown fox jumps", "over the lazy dog and", "runs."]
    for size in (1, 2, 3, 7, 100):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert [line.rstrip() for line in shown(pieces, 27)] == expected, size


def test_a_word_longer_than_a_line_breaks_at_the_edge() -> None:
    assert shown(["ab " + "x" * 45], 21) == ["ab ", "x" * 20, "x" * 20, "x" * 5]


def test_wide_characters_use_two_columns() -> None:
    assert shown(["狐" * 15], 21) == ["狐" * 10, "狐" * 5]


def test_text_already_on_the_line_counts() -> None:
    assert [line.rstrip() for line in shown(["there was"], 21, 14)] == ["there", "was"]


def test_line_breaks_of_the_text_are_kept() -> None:
    assert shown(["one\n\ntwo  three\n"], 40) == ["one", "", "two  three", ""]
