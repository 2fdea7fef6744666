"""The time of a start to the first token, by phase, and that of Python itself."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import EdgeInferError

CHILD = Path(__file__).with_name("startup_child.py")
RUN = "from edgeinfer_tui.command_line import main; main()"
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class StartupPhases:
    """Seconds of one start, and its memory."""

    interpreter: float
    imports: float
    kernels: float
    """Loading compiled kernels from the cache."""
    weights: float
    """The rest of loading: file, tokenizer, plan, weights into the kernels' layout, thread pool."""
    first_token: float
    total: float
    peak_resident_bytes: int
    planned_bytes: int

    @classmethod
    def measure(cls, model: str) -> "StartupPhases":
        """Start a separate program that loads the model and processes one token."""
        answer = _output([sys.executable, "-P", str(CHILD), model, repr(time.time())])
        return cls(**json.loads(answer))


PHASES = ("interpreter", "imports", "kernels", "weights", "first_token", "total")


def commands(model: str) -> dict[str, Callable[[], float]]:
    """The compared programs, name -> seconds of one run."""

    def program(arguments: Sequence[str]) -> Callable[[], float]:
        return lambda: _seconds(arguments)

    path = sys.executable
    return {
        "python -c pass": program([path, "-c", "pass"]),
        'python -c "import numba, numpy"': program([path, "-c", "import numba, numpy"]),
        "edgeinfer run MODEL Once --max-tokens 1": program(
            [path, "-c", RUN, "run", model, "Once", "--max-tokens", "1"]
        ),
    }


def reading(path: Path) -> float:
    """Seconds of reading the file from the page cache."""
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(READ_BYTES):
            pass
    return time.perf_counter() - begin


def _seconds(arguments: Sequence[str]) -> float:
    begin = time.perf_counter()
    _output(arguments)
    return time.perf_counter() - begin


def _output(arguments: Sequence[str]) -> str:
    # An installed package has bytecode; a source tree must be allowed to store it, or compiling is timed too.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EdgeInferError(f"{arguments[-1]}: the timed program failed: {last[0]}")
    return done.stdout
