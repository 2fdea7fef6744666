"""The program with the built-in model: real pipes, a real terminal, real files that are no models."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer import load
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import KernelCache
from tests.edgeinfer.test_builtin_model import GREEDY_TEXT, PROMPT
from tests.model_zoo import ZOO
from tests.tui.conftest import CommandLine

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import termios

from tests.tui.terminal import ROOT, TIMEOUT_SECONDS, Terminal, environment

COMMAND = (sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()")
CACHE = {"XDG_CACHE_HOME": str(user_folder("cache").parent)}
"""Kernels that were built before are used, for any home folder."""
BUILD_SECONDS = 400.0
GREEDY = ("--temperature", "0", "--threads", "2")


@pytest.fixture(scope="module", autouse=True)
def _built_kernels() -> None:
    """The kernels are built before a test with a short timeout needs them."""
    load("tiny").close()


@pytest.fixture(autouse=True)
def _no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is empty for tests in this process."""
    monkeypatch.setattr(sys, "stdin", None)


def run(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**environment(home), **CACHE},
        cwd=ROOT,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def started(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment(home), **CACHE},
        cwd=ROOT,
    )


def test_run_prints_only_the_completion_and_a_newline(home: Path) -> None:
    done = run(home, "run", "tiny", PROMPT, *GREEDY, "--max-tokens", "20")
    assert (done.returncode, done.stdout, done.stderr) == (0, GREEDY_TEXT + "\n", "")


@pytest.mark.slow
def test_a_context_shift_during_a_completion_is_reported(home: Path) -> None:
    options = ("--context", "64", "--max-tokens", "120", "--context-overflow", "shift", *GREEDY)
    done = run(home, "run", "tiny", PROMPT, *options, "--speed", "--device", "cpu")
    assert done.returncode == 0
    assert "the text exceeded the context of 64 tokens and was shifted 4 times: 64 tokens" in done.stderr
    assert "shifted 4 times, 64 tokens evicted" in done.stderr
    assert "120 tokens" in done.stderr
    record = run(home, "run", "tiny", PROMPT, *options, "--output", "json")
    assert json.loads(record.stdout)["usage"]["evicted_tokens"] == 64


def test_a_completion_that_fills_the_context_is_reported(edgeinfer: CommandLine) -> None:
    done = edgeinfer("run", "tiny", PROMPT, "--context", "32", *GREEDY)
    assert done.code == 0
    assert done.err == "edgeinfer: the context of 32 tokens is full: the completion ends here\n"


@pytest.mark.slow
def test_piped_text_is_the_prompt(home: Path) -> None:
    done = run(home, "run", "tiny", *GREEDY, "--max-tokens", "3", "--speed", stdin=PROMPT + "\n")
    assert done.stdout == ", there was\n"
    assert done.stderr.startswith("ttft ")
    assert "prompt " in done.stderr
    assert "(5 tokens)" in done.stderr
    assert "context 8/1024 · stopped at --max-tokens" in done.stderr


@pytest.mark.slow
def test_llama_cpp_gives_the_same_completion_and_as_little_output(home: Path) -> None:
    pytest.importorskip("llama_cpp")
    done = run(home, "run", "tiny", PROMPT, *GREEDY, "--max-tokens", "8", "--engine", "llama.cpp")
    assert (done.returncode, done.stdout, done.stderr) == (0, ", there was a little girl named Lily\n", "")


@pytest.mark.slow
def test_ctrl_c_in_a_response_keeps_the_text(home: Path) -> None:
    process = started(home, "run", "tiny", PROMPT, *GREEDY)
    assert process.stdout is not None
    generated = process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    text = (generated + out).decode()
    assert text.startswith(", there was a little girl name")
    assert text.endswith("\n")
    assert err == b""


@pytest.mark.slow
def test_a_reader_that_closes_early_is_no_error(home: Path) -> None:
    process = started(home, "run", "tiny", PROMPT, *GREEDY)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10) == b", there wa"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(TIMEOUT_SECONDS) == 141


@pytest.mark.slow
def test_a_chat_on_a_terminal_responds_and_quits(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run", *GREEDY, "--max-tokens", "12", command=COMMAND, variables=CACHE)
    opened.append(terminal)
    terminal.wait_for("tiny, context 1024 tokens.")
    terminal.wait_for(">>> ")
    terminal.type("Hello!\r")
    terminal.wait_for("Hello!")
    terminal.wait_for(">>> ")
    terminal.type("/stats\r")
    terminal.wait_for("1 message from you, context ")
    terminal.wait_for(">>> ")
    terminal.type("/clear\r")
    terminal.wait_for("cleared")
    terminal.type("/stats\r")
    terminal.wait_for("0 messages from you, context 0/1024 tokens")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.before


@pytest.mark.parametrize(
    "arguments", [("show", "tiny"), ("list",), pytest.param(("doctor",), marks=pytest.mark.slow)]
)
def test_reports_are_machine_readable(edgeinfer: CommandLine, arguments: tuple[str, ...]) -> None:
    done = edgeinfer(*arguments, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)


def broken(path: Path, kind: str) -> Path:
    """A path without a model."""
    if kind == "cut":
        whole = ZOO["llama"].write(path).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("To whom it may concern: this is a letter.\n")
    elif kind == "architecture":
        path.write_bytes(
            ZOO["llama"]
            .write(path)
            .read_bytes()
            .replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0dream")
        )
    return path


@pytest.mark.parametrize(
    ("kind", "reported"),
    [
        ("cut", "wanted an end at most"),
        ("folder", "a folder without a .gguf file, or config.json and safetensors; name a model"),
        ("text", "magic b'To w', wanted b'GGUF': not a GGUF file"),
        ("nothing", "no such file"),
        ("architecture", "add --engine llama.cpp"),
    ],
)
@pytest.mark.parametrize("command", ["run", "show"])
def test_an_invalid_model_gives_a_one_line_error(
    edgeinfer: CommandLine, tmp_path: Path, command: str, kind: str, reported: str
) -> None:
    path = broken(tmp_path / "model.gguf", kind)
    done = edgeinfer(command, str(path), *(["Hi"] if command == "run" else []))
    if (command, kind) == ("show", "architecture"):
        assert done.code == 0
        return
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("edgeinfer: ")
    assert done.err.count("\n") == 1
    assert reported in done.err


@pytest.mark.slow
def test_a_failure_in_a_subprocess_leaves_no_traceback(home: Path) -> None:
    done = run(home, "run", str(broken(home / "model.gguf", "cut")), "Hi")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("tony", "Hi"), "tony: no such model; did you mean tiny?"),
        (("tiny", "Hi", "--device", "tpu"), "device: saw 'tpu', wanted 'auto', 'cpu', 'cuda', 'cuda:N' or"),
        (("tiny", "Hi", "--draft", "tony"), "tony: no such model; did you mean tiny?"),
        (("tiny", "Hi", "--ram", "1MiB"), "tiny: the model needs "),
        (
            ("tiny", "one two three four five six", "-c", "5"),
            "tokens, the context holds 5; shorten it, or take a larger context ",
        ),
    ],
)
def test_an_unsupported_request_gives_a_one_line_error(
    edgeinfer: CommandLine, arguments: tuple[str, ...], reported: str
) -> None:
    done = edgeinfer("run", *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert reported in done.err


@pytest.mark.slow
def test_generation_works_if_measurements_cannot_be_stored(home: Path) -> None:
    built = KernelCache(user_folder("cache"), choose()).folder
    cache = home / "cache" / "edgeinfer"
    shutil.copytree(built, cache / built.name)
    (cache / "measured.json").mkdir()
    done = subprocess.run(
        [*COMMAND, "run", "tiny", PROMPT, *GREEDY, "--max-tokens", "8"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**environment(home), "XDG_CACHE_HOME": str(home / "cache")},
        cwd=ROOT,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert GREEDY_TEXT.startswith(done.stdout.rstrip("\n"))


@pytest.mark.slow
def test_compilation_at_start_shows_progress(home: Path, opened: list[Terminal]) -> None:
    built = KernelCache(user_folder("cache"), choose())
    result = KernelCache(home / "empty" / "edgeinfer", built.isa)
    # All but one unit are built: the others take half a minute, for the same lines on the screen.
    shutil.copytree(built.folder, result.folder, ignore=shutil.ignore_patterns("rows_Q6_K.o"))
    assert result.find("rows_Q6_K") is None
    terminal = Terminal(
        home,
        *("run", "tiny", PROMPT, *GREEDY, "--max-tokens", "8"),
        command=COMMAND,
        variables={"XDG_CACHE_HOME": str(home / "empty")},
    )
    opened.append(terminal)
    terminal.wait_for("compiling kernels for this machine, once", end=BUILD_SECONDS)
    terminal.wait_for(PROMPT, end=BUILD_SECONDS)
    assert "\n" not in terminal.seen.split(PROMPT)[0]
    terminal.wait_for("there was a little girl named Lily")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
    assert result.find("rows_Q6_K")
