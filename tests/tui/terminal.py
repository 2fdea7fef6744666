"""A process on a pseudo-terminal, with input and output for tests."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

if sys.platform != "win32":
    import pty
    import termios


COMMAND = (sys.executable, "-m", "tests.tui.fake_library")
"""The program with a fake model."""
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 20.0


def environment(home: Path) -> dict[str, str]:
    roots = [str(ROOT / part) for part in (".", "kernels", "offload", "quant_formats", "tui")]
    own = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    return {**own, "HOME": str(home), "TERM": "xterm", "PYTHONPATH": os.pathsep.join(roots)}


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(
        self,
        home: Path,
        *arguments: str,
        command: Sequence[str] = COMMAND,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if sys.platform == "win32":
            pytest.skip("needs a pseudo-terminal")
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment(home), **(variables or {})},
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        self.seen = ""

    def wait_for(self, text: str, end: float = TIMEOUT_SECONDS) -> None:
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
        for _ in range(int(TIMEOUT_SECONDS)):
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.wait_for(text, end=1.0)
                return
        raise AssertionError(f"no {text!r} in {self.seen[-500:]!r}")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def exit_code(self) -> int:
        """Drain the terminal until the process ends."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running; {self.seen[-500:]!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        while select.select([self.master], [], [], 0.05)[0]:
            self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        return self.process.returncode

    def hang_up(self) -> int:
        """Close the terminal of the process; returns its exit code."""
        os.close(self.master)
        self.master = -1
        return self.process.wait(TIMEOUT_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.master >= 0:
            os.close(self.master)
        os.close(self.slave)
