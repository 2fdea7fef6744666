"""A row of the budget benchmark: its columns, and whether the budget was exceeded."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from edgeinfer.benchmarking.random_files import write_random_file
from edgeinfer.loading.loading import load
from edgeinfer.shapes.shape import Shape
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from harness.budget_runs import HEAD, MIB, WARM_UP, BudgetRow, Measured, token_seconds
from tests.offload.model_shapes import GIB, laptop, moe_model

SHAPE = Shape("small", 1, 64, 128, 2, 1, 300, 64)
PLAN = plan_memory(moe_model(), laptop(), PlanOptions(1024, vram=3 * GIB))
OURS = PLAN.own_gpu_bytes
CPU_BYTES = PLAN.bytes_on("cpu")
FOUND = Measured(OURS - 5 * MIB, OURS + 90 * MIB, CPU_BYTES + 3 * MIB, 12.3456, 321.4, 0.876)
ROW = BudgetRow("m", 3 * GIB, 0.25, PLAN, FOUND)


def test_a_row_shows_measured_and_planned_memory() -> None:
    cells = ROW.cells()
    assert len(cells) == len(HEAD)
    assert cells[1:3] == ["3072 MiB", "25%"]
    assert cells[4:6] == [f"{OURS / MIB:.0f}", f"{OURS / (OURS - 5 * MIB):.3f}"]
    assert cells[6] == f"{OURS / MIB + 90:.0f}"
    assert cells[7:9] == [f"{CPU_BYTES / MIB:.0f}", f"{CPU_BYTES / (CPU_BYTES + 3 * MIB):.3f}"]
    decode, prompt = 1 / PLAN.prediction.seconds_empty, PLAN.prediction.prefill_tokens_per_second
    assert cells[10:12] == ["12.35", f"{12.3456 / decode:.2f}"]
    assert cells[12:14] == ["321.4", f"{321.4 / prompt:.2f}"]
    assert cells[14] == "0.88"


def test_a_failed_load_reports_the_reason() -> None:
    failed = BudgetRow("m", GIB, 0.05, failure="main memory is too small")
    assert not failed.is_within_budget
    assert failed.cells()[3] == "main memory is too small"
    assert len(failed.cells()) == len(HEAD)


def test_timing_tokens_leaves_the_backend_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random_file(path, SHAPE, "Q4_0")
    with load(path, device="cpu", draft=None, context=32) as model:
        assert 0 < token_seconds(model, 3) < 60
        assert len(model.engine.ids) == 3 + WARM_UP
        model.engine.rewind(0)
