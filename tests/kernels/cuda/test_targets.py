"""Kernels are compiled for every supported GPU, without one."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.kernels.shared_results import made_once

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
TARGETS = (75, 80, 86, 89, 90, 100, 120)
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
PROMPT_KERNELS = {
    "norm_rows_kernel", "add_norm_rows_kernel", "activation_rows_kernel", "rope_append_kernel",
    "flash_attention_kernel", "context_shift_kernel", "unpack_kernel", "unpack_floats_kernel",
    "group_assignments_kernel", "grouped_product_kernel", "add_experts_kernel", "tiles_kernel",
    "candidates_kernel", "sample_kernel", "best_of_slices_kernel", "argmax_kernel",
}  # fmt: skip
STEP_KERNELS = {
    "embed_kernel", "rows_kernel", "decode_attention_kernel", "residual_kernel", "gated_kernel",
    "head_kernel", "sample_best_kernel", "add_norm_kernel", "select_experts_kernel", "expert_gated_kernel",
    "expert_down_kernel", "send_kernel", "receive_kernel",
}  # fmt: skip
PLANE_KERNELS = {"dequantize_kernel", "expert_product_kernel", "embed_rows_kernel"}
FOUR_BIT_KERNELS = {"hadamard_heads_kernel"}
FOUR_BIT_TARGETS = (75, 86, 90, 120)
"""Targets that compile the prompt kernels of a four-bit cache; the others those of an eight-bit one."""
STEP_TARGETS = (75, 80, 90, 120)
"""Targets that compile a few steps, each one for another family of formats."""
F16_1024 = ("75,80,86", "89,90,100,120")
"""One process per target; steps take longest, two targets compile two sets of kernels."""
KNOWN_SPILLS = {
    ("sm_80", "decode_attention_kernel"): 8,
    ("sm_80", "flash_attention_kernel"): 16,
    ("sm_120", "gated_kernel"): 8,
}
"""Bytes per thread: a head of 64 in a step of two tokens, a head of 32 in q8_0, and Q4_K with one warp."""


@pytest.fixture(scope="module")
def table(shared_folder: Path) -> list[list[str]]:
    """The rows that the benchmark prints, by processes without the interpreter. Triton keeps what they
    compile, so that the benchmark itself needs little time in `.ci/run`.
    """
    rows: list[list[str]] = made_once(shared_folder / "targets.json", _table)
    return rows


def _table() -> list[list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    parts = [ROOT, *(ROOT / name for name in ("kernels", "offload", "quant_formats", "tui"))]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, parts))
    script = str(ROOT / "benchmarks" / "gpu" / "kernels.py")
    commands = [[sys.executable, script, "--smoke", "--targets", targets] for targets in F16_1024]
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(partial(_output, environment), commands))
    lines = [line for run in runs for line in run.strip().splitlines()[2:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _output(environment: dict[str, str], command: list[str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_compiles_for_every_target(table: list[list[str]]) -> None:
    for target in TARGETS:
        steps = STEP_KERNELS | PLANE_KERNELS if target in STEP_TARGETS else set()
        four_bits = FOUR_BIT_KERNELS if target in FOUR_BIT_TARGETS else set()
        assert {row[1] for row in table if row[0] == f"sm_{target}"} == PROMPT_KERNELS | steps | four_bits


def test_only_listed_kernels_spill_registers(table: list[list[str]]) -> None:
    spilled = {(row[0], row[1]): int(row[5]) for row in table if int(row[5])}
    assert spilled.keys() <= KNOWN_SPILLS.keys()
    assert all(count <= KNOWN_SPILLS[kernel] for kernel, count in spilled.items())


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_fits_the_target(table: list[list[str]], target: int) -> None:
    assert max(int(row[6]) for row in table if row[0] == f"sm_{target}") <= SHARED_KIB[target] * 1024


def test_only_decode_steps_use_dependent_launch_on_targets_with_support(table: list[list[str]]) -> None:
    dependent = {(row[0], row[1]) for row in table if row[7] == "yes"}
    assert dependent == {(f"sm_{target}", name) for target in (90, 120) for name in STEP_KERNELS}
