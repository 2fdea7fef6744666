"""The program on a real terminal and in real pipes: a separate process, with signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tui.terminal import COMMAND, ROOT, TIMEOUT_SECONDS, Terminal, environment

if sys.platform != "win32":
    import termios


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


def test_ctrl_c_in_a_response_exits_with_130_and_restores_the_terminal(
    home: Path, opened: list[Terminal]
) -> None:
    terminal = Terminal(home, "run", "tiny", "Once upon")
    opened.append(terminal)
    terminal.wait_for("Once upon")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    assert terminal.exit_code() == 130
    assert "stopped by you" in terminal.seen
    assert "Traceback" not in terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.before


@pytest.mark.slow
def test_ctrl_c_while_loading_ends_quietly(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run", "tiny", "Once upon", "--threads", "99")
    opened.append(terminal)
    terminal.wait_for("loading")
    terminal.type("\x03")
    assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.seen


def test_a_chat_stops_a_response_edits_with_history_and_quits(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run")
    opened.append(terminal)
    terminal.wait_for(">>> ")
    terminal.type("Hello there\r")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    terminal.type("/stats\r")
    terminal.wait_for("1 message from you")
    terminal.wait_for(">>> ")
    terminal.type("\x1b[A\x1b[A")
    terminal.wait_for("Hello there")
    terminal.press_until("\x03", "(Ctrl-D or /exit leaves)")
    terminal.wait_for(">>> ")
    terminal.type("/edit\r")
    terminal.wait_for(">>> Hello there")
    terminal.type(" again\r")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "Hello there again" in (home / ".local/state/edgeinfer/history").read_text()
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_a_closed_reader_is_no_error(home: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "tiny", "Once"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home),
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == b"word"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(TIMEOUT_SECONDS) == 141


@pytest.mark.slow
def test_sigint_in_a_pipe_keeps_the_text(home: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "tiny", "Once"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home),
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.read(9) == b"word word"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err == b""


def test_help_needs_neither_the_engine_nor_numpy() -> None:
    code = (
        "import sys, json\n"
        "from edgeinfer_tui.command_line import exit_code\n"
        "exit_code(['run', '--help'])\n"
        "heavy = ['numpy', 'numba', 'textual', 'torch', 'edgeinfer.engine', 'edgeinfer.model']\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(ROOT), check=True
    )
    assert json.loads(result.stderr) == []
    assert "--max-tokens" in result.stdout


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.35])
def test_ctrl_c_while_starting_leaves_no_traceback(home: Path, delay: float) -> None:
    program = (
        "from edgeinfer_tui.command_line import main\n"
        "print('begun', flush=True)\n"
        "main(['run', 'tiny', 'Once'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home),
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay)
    process.send_signal(signal.SIGINT)
    # Its input stays open: it waits for that if it has started.
    process.wait(TIMEOUT_SECONDS)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == b""


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("columns", "name"), [(1, ""), (2, ""), (3, "dumb"), (2, "vt100"), (10, "xterm")])
def test_a_chat_works_on_a_narrow_terminal(
    home: Path, opened: list[Terminal], columns: int, name: str
) -> None:
    terminal = Terminal(home, "run", variables={"TERM": name})
    opened.append(terminal)
    termios.tcsetwinsize(terminal.slave, (24, columns))
    terminal.wait_for(">>> ")
    terminal.type("hello " * 20 + "\t\x12\n")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


@pytest.mark.slow
def test_undecodable_bytes_do_not_end_a_line_chat(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run")
    opened.append(terminal)
    terminal.wait_for(">>> ")
    os.write(terminal.master, b"a\xff\xfe\xc3b\r")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "edgeinfer:" not in terminal.seen


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("private", [False, True])
def test_a_private_chat_stores_nothing(home: Path, opened: list[Terminal], private: bool) -> None:
    terminal = Terminal(home, "run", *(["--private"] if private else []))
    opened.append(terminal)
    terminal.wait_for(">>> ")
    terminal.type("a secret\r")
    terminal.wait_for("word word word")
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    stored = [path for path in home.rglob("*") if path.is_file() and b"a secret" in path.read_bytes()]
    assert bool(stored) is not private


@pytest.mark.slow
def test_tab_completes_and_ctrl_u_clears_in_a_line_chat(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run")
    opened.append(terminal)
    terminal.wait_for(">>> ")
    terminal.type("some words\x01\x15/sta\t\r")
    terminal.wait_for("0 messages from you")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
