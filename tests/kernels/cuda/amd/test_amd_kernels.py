"""Kernels are compiled for AMD's GPUs by Triton's HIP backend, without one. None has run them."""

import re
from pathlib import Path

import pytest

from tests.kernels.without_interpreter import output_without_interpreter

pytestmark = pytest.mark.slow

EVERY = pytest.mark.every_case
TARGETS = (
    "gfx1100", pytest.param("gfx1201", marks=EVERY), "gfx90a", pytest.param("gfx942", marks=EVERY)
)  # fmt: skip
"""One of wavefronts of 32 threads and one of 64; `--attack-share 1` adds the others."""
SHARED_BYTES = 64 << 10
CAPABILITY = "75"
"""The tiles are those of GPUs with as much shared memory."""
ROOT = Path(__file__).resolve().parents[4]
MODULES = (
    ("tests.kernels.cuda.compile_recurrent_kernels", "--alone"),
    ("tests.kernels.cuda.decode.compile_gemma3n_kernels",),
    ("tests.kernels.cuda.cache.compile_ring_kernels",),
)
"""Modules and their further arguments."""


def compiled(target: str, module: str, *arguments: str) -> str:
    """What a module prints that compiles kernels."""
    command = ["-m", "tests.kernels.cuda.amd.compile_for_amd", target, module, *arguments]
    return output_without_interpreter(*command, more_paths=(str(ROOT / "benchmarks"),))


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_prompts_and_steps_compiles_for_amd(target: str) -> None:
    table = compiled(target, "gpu.kernels", "--smoke", "--targets", CAPABILITY).strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len(rows) >= 50
    assert {"send_kernel", "receive_kernel", "flash_attention_kernel"} <= {row[1] for row in rows}
    assert max(int(row[5]) for row in rows) <= 64  # bytes that a thread spills
    assert max(int(row[6]) for row in rows) <= SHARED_BYTES
    assert {row[7] for row in rows} == {"no"}


@pytest.mark.parametrize("target", ["gfx1100", pytest.param("gfx942", marks=EVERY)])
@pytest.mark.parametrize(("module", "options"), [(module, rest) for module, *rest in MODULES])
def test_kernels_of_other_blocks_compile_for_amd(module: str, options: list[str], target: str) -> None:
    text = compiled(target, module, CAPABILITY, *options)
    shared = [int(number) for number in re.findall(r"shared_bytes=(\d+)", text)]
    assert len(shared) >= 12
    assert max(shared) <= SHARED_BYTES
