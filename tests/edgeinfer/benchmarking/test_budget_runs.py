"""A row of the sweep through budgets: what it shows, and whether the budget was kept."""

from dataclasses import replace

from edgeinfer.benchmarking.budget_runs import HEAD, MIB, BudgetRow
from edgeinfer_offload.memory_plan import PlanWishes
from edgeinfer_offload.plan import plan_memory
from tests.offload.model_shapes import GIB, laptop, mixture_model

PLAN = plan_memory(mixture_model(), laptop(), PlanWishes(1024, vram=3 * GIB))
OURS = sum(
    item.bytes
    for item in PLAN.items
    if item.device == "gpu" and item.item not in ("loading, then libraries", "CUDA context")
)
ROW = BudgetRow("m", 3 * GIB, 0.25, PLAN, OURS - 5 * MIB, OURS + 90 * MIB, 12.3456, 321.4)


def test_a_row_shows_what_was_held_beside_what_was_planned() -> None:
    cells = dict(zip(HEAD, ROW.cells(), strict=True))
    assert (cells["budget"], cells["share"]) == ("3072 MiB", "25%")
    assert cells["planned MiB"] == f"{OURS / MIB:.0f}"
    assert cells["held MiB"] == f"{OURS / MIB - 5:.0f}"
    assert cells["at most MiB"] == f"{OURS / MIB + 90:.0f}"
    assert cells["planned/held"] == f"{OURS / (OURS - 5 * MIB):.3f}"
    assert (cells["tokens/s"], cells["prompt tokens/s"]) == ("12.35", "321.4")


def test_a_budget_that_is_overdrawn_is_told() -> None:
    assert ROW.is_kept
    for over in (replace(ROW, at_most=3 * GIB + 1), replace(ROW, held=int(1.02 * OURS))):
        assert not over.is_kept
        assert dict(zip(HEAD, over.cells(), strict=True))["kept"] == "NO"


def test_a_model_that_could_not_be_loaded_says_why() -> None:
    failed = BudgetRow("m", GIB, 0.05, None, 0, 0, 0.0, 0.0, "main memory is too small")
    assert not failed.is_kept
    assert failed.cells()[3] == "main memory is too small"
    assert len(failed.cells()) == len(HEAD)
