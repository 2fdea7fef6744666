"""Compiles grammars in a child process first, so that a grammar that can't be compiled raises an error
instead of a crash.

llguidance walks a grammar recursively without a depth limit: some thousand chained rules or references
overflow the stack, and intersections of expressions may never finish compiling.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from edgeinfer.errors import SettingError
from edgeinfer_quant_formats.system.processes import apart_from_terminal

MAX_TEXT_BYTES = 1 << 20
MAX_SECONDS = 60.0
"""Wall time limit per grammar, if the limit on the child's CPU time doesn't apply (Windows)."""
REMEMBERED = 64

_CHILD = Path(__file__).with_name("compile_child.py")


@lru_cache(maxsize=REMEMBERED)
def compiled(kind: str, text: str, overrides: str = "{}") -> str:
    """The input for `LLMatcher`, from a JSON schema (`kind` "schema") or a grammar ("grammar").

    `overrides`: JSON, llguidance's options for a schema.

    Raises:
        SettingError: it can't be parsed, nothing satisfies it, or compilation exceeds the limits.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_TEXT_BYTES:
        raise SettingError(f"{kind}: saw {size} bytes, wanted {MAX_TEXT_BYTES} at most")
    options = json.loads(overrides) or None
    reply = child_process.request_compilation({"kind": kind, "text": text, "overrides": options})
    if reply is None:
        raise SettingError(
            f"{kind}: too deep or too large to compile (chained rules, nesting, intersections); simplify it"
        )
    if "error" in reply:
        raise SettingError(f"{kind}: {one_line(reply['error'])}")
    return str(reply["compiled"])


def one_line(error: str, longest: int = 300) -> str:
    """An error of llguidance in one line of bounded length."""
    line = " ".join(error.split("<state>")[0].split()) or "it can't be used"
    return line if len(line) <= longest else f"{line[:longest]}…"


class _Child:
    """The child process; started at first use, and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def request_compilation(self, request: dict[str, Any]) -> dict[str, str] | None:
        """Send a request and return the reply; None: the child crashed or timed out."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            finally:
                timer.cancel()
            if line.endswith("\n"):
                return dict(json.loads(line))
            self._end()
            return None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and (self._owner != os.getpid() or self._process.poll() is not None):
            self._end()
        if self._process is None:
            folders = [folder for folder in sys.path if folder]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                **apart_from_terminal(),  # Ctrl-C is for the parent only
            )
            self._owner = os.getpid()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._owner == os.getpid():  # after a fork it belongs to the parent
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """Ends the child when this process exits."""
        with self._lock:
            self._end()


child_process = _Child()
atexit.register(child_process.close)
