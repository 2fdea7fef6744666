"""The kernels of recurrent blocks compile for a GPU: the interpreter accepts more than the compiler."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_recurrent_kernels_compile_for_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.compile_recurrent_kernels", "90"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.splitlines()) >= 22
