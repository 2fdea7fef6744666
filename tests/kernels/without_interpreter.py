"""Runs Python in a process that compiles Triton's kernels instead of interpreting them."""

import os
import subprocess
import sys


def output_without_interpreter(*arguments: str, more_paths: tuple[str, ...] = ()) -> str:
    """What a process with these arguments prints; `more_paths`: to import from, besides this process's."""
    paths = os.pathsep.join([*sys.path, *more_paths])
    run = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
