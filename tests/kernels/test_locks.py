"""Lock files: waiting for another process is announced, and ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer_kernels.system.locks import SILENT_SECONDS, LockTimeoutError, file_lock

HOLDER = """
import sys
from pathlib import Path
from edgeinfer_kernels.system.locks import file_lock
with file_lock(Path(sys.argv[1]), 1.0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another program that holds the lock until its input ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


class Clock:
    """A clock that advances by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_waiting_is_announced_once_and_ends(
    tmp_path: Path, holder: "subprocess.Popen[str]", logged: list[str]
) -> None:
    clock, path = Clock(), tmp_path / "lock"
    with pytest.raises(LockTimeoutError) as caught, file_lock(path, 60, clock, clock.sleep):
        pass
    assert str(caught.value) == f"{path}: held by another edgeinfer (process {holder.pid}) for 60 s"
    assert logged == [f"waiting for another edgeinfer (process {holder.pid}), which holds {path}"]
    assert SILENT_SECONDS < 2


@pytest.mark.skipif(sys.platform != "linux", reason="how a process is stopped is told elsewhere otherwise")
def test_a_stopped_lock_holder_is_reported(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    import signal

    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    clock = Clock()
    with (
        pytest.raises(LockTimeoutError, match=f"process {holder.pid}, which is stopped"),
        file_lock(tmp_path / "lock", 10, clock, clock.sleep),
    ):
        pass


def test_the_lock_of_a_killed_program_is_free(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    with file_lock(tmp_path / "lock", 0):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege there")
def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"), file_lock(tmp_path / "lock", 0):
        pass
    assert target.read_text() == "kept"
