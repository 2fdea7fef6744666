"""The program on a real terminal and in real pipes: a process of its own, signals and all."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")

COMMAND = [sys.executable, "-m", "tests.tui.fake_library"]
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 20.0


def environment(home: Path) -> dict[str, str]:
    roots = [str(ROOT / part) for part in (".", "kernels", "offload", "quant_formats", "tui")]
    return {**os.environ, "HOME": str(home), "TERM": "xterm", "PYTHONPATH": os.pathsep.join(roots)}


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(home),
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        self.seen = ""

    def wait_for(self, text: str, end: float = PATIENCE_SECONDS) -> None:
        """Read until `text` has come since the last wait."""
        deadline = time.monotonic() + end
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen[-500:]!r}"
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        self.seen = self.seen.split(text, 1)[1]

    def press_until(self, key: str, text: str) -> None:
        """Press `key` each second until `text` comes.

        CPython's readline misses a signal that arrives while it redraws the line, until the next key.
        """
        for _ in range(int(PATIENCE_SECONDS)):
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.wait_for(text, end=1.0)
                return
        raise AssertionError(f"no {text!r} in {self.seen[-500:]!r}")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def exit_code(self) -> int:
        """Drain the terminal until the process ends."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running; {self.seen[-500:]!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        while select.select([self.master], [], [], 0.05)[0]:
            self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


def test_ctrl_c_in_an_answer_ends_it_with_130_and_a_whole_terminal(
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


def test_ctrl_c_while_loading_ends_quietly(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run", "tiny", "Once upon", "--threads", "99")
    opened.append(terminal)
    terminal.wait_for("loading")
    terminal.type("\x03")
    assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.seen


def test_a_chat_stops_an_answer_edits_with_history_and_leaves(home: Path, opened: list[Terminal]) -> None:
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


def test_a_reader_that_goes_away_is_no_error(home: Path) -> None:
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
    assert process.wait(PATIENCE_SECONDS) == 141


def test_sigint_in_a_pipe_keeps_what_was_said(home: Path) -> None:
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
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert err == b""


def test_help_needs_neither_the_engine_nor_numpy() -> None:
    code = (
        "import sys, json\n"
        "from edgeinfer_tui.command_line import exit_code\n"
        "exit_code(['run', '--help'])\n"
        "heavy = ['numpy', 'numba', 'textual', 'torch', 'edgeinfer']\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(ROOT), check=True
    )
    assert json.loads(result.stderr) == []
    assert "--max-tokens" in result.stdout


@pytest.mark.parametrize("moment", [0.05, 0.1, 0.2, 0.35])
def test_ctrl_c_while_starting_leaves_no_traceback(home: Path, moment: float) -> None:
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
        process.wait(moment)
    process.send_signal(signal.SIGINT)
    # Its input stays open meanwhile: it waits for that if it has come so far.
    process.wait(PATIENCE_SECONDS)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == b""
