"""The kernels of blocks compile for a GPU: the interpreter accepts more than the compiler."""

import os
import re
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


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (90, 227), (120, 99)])
def test_latent_kernels_compile_for_gpus_and_fit_their_shared_memory(
    capability: int, shared_kib: int
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.compile_latent_kernels", str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    shared = [int(found) for found in re.findall(r"shared_bytes=(\d+)", run.stdout)]
    assert len(shared) >= 30
    assert max(shared) <= shared_kib << 10
    spilled = [int(found) for found in re.findall(r"spilled_bytes=(\d+)", run.stdout)]
    assert max(spilled) < 256
