"""Random command lines: odd values, odd files, closed streams, tiny terminals. Nothing but one-line errors.

In this process a fake model responds and nothing is served or downloaded; in child processes, and on
pseudo-terminals, the program is the real one.
"""

import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from edgeinfer_tui.command_list import app
from tests.tui.commands.test_run import pipe_in
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import FakeModel
from tests.tui.terminal import ROOT, Terminal, environment

if sys.platform != "win32":
    import termios


pytestmark = pytest.mark.slow

SEED = 20261123
IN_PROCESS = 2000
WITH_STREAMS = 40
ON_TERMINALS = 40
CODES = (0, 1, 2)
ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b31m"
VALUES = (
    "", " ", "0", "-1", "1", "7", "99", "1e400", "nan", "-inf", "9" * 40, "0x10", "١٢", "1,2", "a", "=", "--",
    "-", "é" * 3000, ESCAPE, "a\nb", "%s%n", "{}", "[" * 200, "../..", "~", "~nobody/x", "/dev/zero",
    "/dev/null", "/", ".", "tiny", "qwen38b", "auto", "cuda:99", "cpu: x", "8GiB", "-8GiB", "1PiB", "f16",
    "none", "true", "x=1", "1=2", "\udcff",
)  # fmt: skip
ODD_FLAGS = ("-ngl", "--no-such", "--temp", "-xyz", "--", "-p", "-t4", "-n-5", "--help")
FORBIDDEN = re.compile(r"Traceback|a bug in edgeinfer|pydantic|Input should|<class|object at 0x|NoneType")
PROGRAM = (sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
MEASURING = ("bench", "eval", "profile", "doctor", "quantize")
"""Commands that take long with a valid model: they get other arguments here."""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Paths to files that are no models, and a missing one."""
    folder = tmp_path / "files"
    folder.mkdir()
    contents = {
        "empty.gguf": b"",
        "magic.gguf": b"GGUF",
        "noise.gguf": random.Random(SEED).randbytes(5000),
        "text.txt": b"Once upon a time",
        "latin.txt": b"caf\xe9",
        "long.gguf": b"GGUF\x03\0\0\0" + b"\xff" * 64,
        "schema.json": b'{"type": "object"}',
        f"{ESCAPE.replace('/', '')}.gguf": b"GGUF\x03\0\0\0",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [*(str(folder / name) for name in contents), str(folder), str(folder / "missing.gguf")]


def command_line(random_: random.Random, files: list[str]) -> list[str]:
    """A random command with random options, many of them its own, and random values."""
    command = random_.choice([*COMMANDS, *COMMANDS, "lst", "", ESCAPE])
    spec = COMMANDS.get(command)
    flags = [] if spec is None else [f for p in spec.params for f in p.opts if f.startswith("-")]
    words = [command]
    for _ in range(random_.randrange(6)):
        kind = random_.random()
        value = random_.choice(files if random_.random() < 0.4 else VALUES)
        if kind < 0.5 and flags:
            flag = random_.choice(flags)
            words += [f"{flag}={value}"] if random_.random() < 0.3 else [flag, value]
        elif kind < 0.6:
            words.append(
                random_.choice(("-ngl", "--no-such", "--temp", "-xyz", "--", "-p", "-t4", "-n-5", "--help"))
            )
        else:
            words.append(value)
    if command in MEASURING:
        words = [word for word in words if word not in ("tiny", "--warm")]
        words += [] if "--help" in words else ["--no-such-option"] if command == "doctor" else [files[2]]
    return words


@pytest.fixture
def nothing_real(monkeypatch: pytest.MonkeyPatch, fake: FakeModel) -> None:
    """Nothing is served, pulled, or drawn."""
    from edgeinfer_tui.commands import chat_command, pull_command, serve_command

    def refuse(*given: object, **named: object) -> None:
        raise OSError("not in this test")

    monkeypatch.setattr(serve_command, "run_server", refuse)
    monkeypatch.setattr(chat_command, "chat_program", refuse)
    monkeypatch.setattr(pull_command, "pull_model", refuse)
    monkeypatch.setattr("edgeinfer_tui.commands.run_command.pull_model", refuse)


def check(words: list[str], code: int, out: str, err: str) -> None:
    """Checks for every command line."""
    message = f"{words!r}: exit {code}\n{err[-2000:]}"
    assert code in CODES, message
    assert FORBIDDEN.search(err) is None, message
    if code:
        lines = err.splitlines()
        assert lines, message
        assert lines[-1].startswith("edgeinfer: "), message
        assert max(map(len, lines)) < 5000, message
    if code == 2:
        assert err.count("\n") == 1, message


def test_random_command_lines_in_process(
    edgeinfer: CommandLine,
    nothing_real: None,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    tmp_path: Path,
) -> None:
    random_, codes = random.Random(SEED), Counter[int]()
    monkeypatch.chdir(tmp_path)
    for _ in range(IN_PROCESS):
        words = command_line(random_, files)
        pipe_in(monkeypatch, random_.choice((b"", b"Hi", b"a\0b", b"\xff", b"x" * 100_000)))
        outcome = edgeinfer(*words)
        check(words, outcome.code, outcome.out, outcome.err)
        codes[outcome.code] += 1
    print(f"{IN_PROCESS} command lines in one process: exit codes {dict(sorted(codes.items()))}")
    assert set(codes) == set(CODES)


REDIRECTIONS = (
    "<&-",
    ">&-",
    "2>&-",
    ">/dev/full",
    "2>/dev/full",
    "<&- >&- 2>&-",
    "</dev/zero",
    ">&- 2>/dev/full",
)
QUICK = (
    *("show tiny", "list", "config", "history", "config --path", "--version", "run --help", "rm nope"),
    *("plan nope", "run tiny", "chat", "chats --search x", "nope", "show --json"),
)


def test_closed_and_full_streams_under_every_command(tmp_path: Path) -> None:
    random_, codes = random.Random(SEED), Counter[int]()
    for _ in range(WITH_STREAMS):
        words, redirection = random_.choice(QUICK), random_.choice(REDIRECTIONS)
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -c "{PROGRAM[2]}" {words} {redirection}', sys.executable],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=environment(tmp_path),
            cwd=ROOT,
            timeout=120,
            check=False,
        )
        assert done.returncode in CODES, (words, redirection, done.returncode, done.stderr)
        assert FORBIDDEN.search(done.stderr) is None, (words, redirection, done.stderr)
        assert "Exception ignored" not in done.stderr, (words, redirection, done.stderr)
        codes[done.returncode] += 1
    print(
        f"{WITH_STREAMS} command lines with closed or full streams: exit codes {dict(sorted(codes.items()))}"
    )


def test_data_cannot_control_a_terminal(
    home: Path, files: list[str], opened: list[Terminal], tmp_path: Path
) -> None:
    random_, codes = random.Random(SEED), Counter[int]()
    hostile = next(file for file in files if "\x1b" in file)
    makers: tuple[Callable[[], list[str]], ...] = (
        lambda: ["show", hostile],
        lambda: ["plan", hostile],
        lambda: ["run", hostile, "Hi"],
        lambda: ["bench", hostile],
        lambda: ["history", ESCAPE],
        lambda: ["rm", hostile],
        lambda: ["eval", "--text", f"{hostile}.missing", "tiny"],
        lambda: [ESCAPE, ESCAPE],
        lambda: ["list", ESCAPE],
        lambda: ["run", "tiny", f"--{ESCAPE}"],
        lambda: ["plan", "tiny", "--device", ESCAPE],
    )
    for _ in range(ON_TERMINALS):
        words = random_.choice(makers)()
        variables = {"TERM": random_.choice(("", "dumb", "xterm-256color", "nonsense"))}
        terminal = Terminal(home, *words, command=PROGRAM, variables=variables)
        termios.tcsetwinsize(terminal.slave, (random_.choice((1, 24)), random_.choice((1, 2, 20, 80))))
        opened.append(terminal)
        code = terminal.exit_code()
        seen = terminal.seen.replace("\r\x1b[K", "")
        assert code in CODES, (words, code, seen)
        assert re.search("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]", seen) is None, (words, seen)
        assert FORBIDDEN.search(seen) is None, (words, seen)
        codes[code] += 1
        terminal.close()
        opened.clear()
    print(f"{ON_TERMINALS} command lines on terminals: exit codes {dict(sorted(codes.items()))}")
