"""`edgeinfer batch` as a process: killed, stopped by Ctrl-C, and continued."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.system.marks import NEEDS_SIGNALS
from tests.tui.conftest import CommandLine

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

PROGRAM = [sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()"]
LINES = 24


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(LINES):
            body = {"messages": [{"role": "user", "content": f"Tell {number}"}], "max_tokens": 100}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            print(json.dumps(line), file=file)
    return path


def started(source: Path, target: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    options = ["--model", "tiny", "--device", "cpu", "--draft", "none"]
    return subprocess.Popen(
        [*PROGRAM, "batch", str(source), str(target), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def interrupted(source: Path, target: Path, number: signal.Signals) -> tuple[int, str]:
    """The exit code and the messages of a batch that gets a signal after its third row."""
    program = started(source, target)
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        with pytest.raises(subprocess.TimeoutExpired):  # It has not ended.
            program.wait(0.02)
    program.send_signal(number)
    return_code = program.wait(20)
    assert program.stderr is not None
    with program.stderr:
        return return_code, program.stderr.read()


def custom_ids(target: Path) -> list[str]:
    return sorted((json.loads(line)["custom_id"] for line in target.read_text().splitlines()), key=int)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_after_a_kill_nothing_is_lost_and_nothing_is_done_twice(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    code, _ = interrupted(source, target, signal.SIGKILL)
    assert code == -signal.SIGKILL
    before = target.read_text().splitlines()
    assert 3 <= len(before) < LINES
    program = started(source, target)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0
    assert f"{LINES - len(before)} lines completed, 0 with an error, {len(before)} were done before" in err
    assert target.read_text().splitlines()[: len(before)] == before
    assert custom_ids(target) == [str(number) for number in range(LINES)]


@pytest.mark.slow
@NEEDS_SIGNALS
def test_ctrl_c_keeps_the_rows(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    code, err = interrupted(source, target, signal.SIGINT)
    assert code == 130
    done = len(custom_ids(target))
    assert f"stopped: {done} of {LINES} lines are done; the same command continues" in err


def test_the_input_is_no_output(edgeinfer: CommandLine, source: Path) -> None:
    outcome = edgeinfer("batch", str(source), str(source))
    assert outcome.code == 2
    assert "in.jsonl: is the input; name another file for the output" in " ".join(outcome.err.split())
