"""FLOP/B of each part, and the speed over batch size and context by the roofline model."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.report.plan_curve import BATCHES, PlanCurve, curve_text, plan_curve
from tests.offload.model_shapes import GIB, PLAN_OPTIONS, cpu_only, dense_model, laptop, moe_model, planned


def curve_of(model: ModelSizes, machine: Machine, trained: int = 16384) -> PlanCurve:
    def plan_for(context: int) -> MemoryPlan | None:
        try:
            return plan_memory(model, machine, PlanOptions(context))
        except PlanError:
            return None

    return plan_curve(model, plan_for, trained)


def rate(curve: PlanCurve, batch: int, context: int) -> float | None:
    (point,) = [each for each in curve.points if (each.batch, each.context) == (batch, context)]
    return point.tokens_per_second


@pytest.mark.parametrize("vram", [8, 4, 0])
def test_operations_do_not_depend_on_the_placement(vram: float) -> None:
    # Two for each weight of 32 layers and the head, and four for each element of a head and position.
    weights = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    attention = 32 * 4 * (4096 + 1 / 2) * 4096
    plan = planned(dense_model(), vram)
    assert sum(item.operations for item in plan.items) == pytest.approx(2 * weights + attention)


@pytest.mark.parametrize("vram", [8, 0])
@pytest.mark.parametrize("cache", [False, True])
def test_a_token_computes_with_the_experts_that_it_uses(vram: float, cache: bool) -> None:
    plan = planned(moe_model(), vram, expert_cache=cache)
    experts = sum(item.operations for item in plan.items if " experts" in item.item)
    assert experts == pytest.approx(48 * 2 * 8 * 3 * 768 * 2048)


def test_weights_of_four_bits_have_three_and_a_half_operations_for_each_byte() -> None:
    plan = plan_memory(dense_model(), cpu_only(), PLAN_OPTIONS)
    item = next(item for item in plan.items if item.item == "layer 0 feed-forward")
    assert item.intensity == pytest.approx(2 * 3 * 4096 * 14336 / item.bytes)
    assert item.intensity == pytest.approx(32 / 9, rel=0.01)
    assert item.limited_by(plan.machine) == "memory"
    reported = plan.to_dict()["items"][0]
    assert (reported["limited_by"], reported["intensity"] > 3) == ("memory", True)


def test_a_processor_with_few_operations_is_bound_by_compute() -> None:
    machine = cpu_only()
    weak = replace(machine, processor=replace(machine.processor, operations_per_second=50e9))
    plan = plan_memory(dense_model(), weak, PLAN_OPTIONS)
    assert {item.limited_by(weak) for item in plan.items} == {"compute", ""}


def test_a_step_of_one_token_takes_the_time_of_the_plan() -> None:
    for plan in (planned(dense_model(), 4), planned(moe_model(), 8, expert_cache=True)):
        for item in plan.items:
            assert item.milliseconds(1, plan.machine) == pytest.approx(item.ms_per_token)


@pytest.mark.parametrize("machine", [laptop(), laptop(3 * GIB), cpu_only()], ids=["gpu", "split", "cpu"])
def test_the_first_row_has_the_speeds_of_the_plans(machine: Machine) -> None:
    curve = curve_of(dense_model(), machine)
    assert list(curve.plans) == [256, 1024, 4096, 16384]
    for context, plan in curve.plans.items():
        assert plan is not None
        assert rate(curve, 1, context) == pytest.approx(plan.prediction.decode_tokens_per_second)


def test_more_sequences_share_the_reads_of_weights_until_compute_is_the_limit() -> None:
    curve = curve_of(dense_model(), cpu_only(), trained=1024)
    rates = [rate(curve, batch, 256) or 0.0 for batch in BATCHES]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(rates[-2], rel=0.05)
    limits = [point.limited_by for point in curve.points if point.context == 256]
    assert (limits[0], limits[-1]) == ("memory", "compute")
    intensities = [point.intensity for point in curve.points if point.context == 256]
    assert intensities == sorted(intensities)


def test_a_batch_reads_more_experts_than_a_token() -> None:
    dense, moe = (curve_of(model, cpu_only(), trained=256) for model in (dense_model(), moe_model()))
    gains = [(rate(curve, 2, 256) or 0.0) / (rate(curve, 1, 256) or 1.0) for curve in (dense, moe)]
    assert gains[0] > 1.9
    assert 1.0 < gains[1] < 1.6


def test_caches_that_do_not_fit_have_no_speed() -> None:
    curve = curve_of(dense_model(), cpu_only(ram=8 * GIB))
    assert rate(curve, 1, 16384) is not None
    assert rate(curve, 4, 16384) is None
    assert rate(curve, 4, 256) is not None
    small = curve_of(dense_model(), cpu_only(ram=6 * GIB), trained=65536)
    assert small.plans[65536] is None
    lines = [line.split() for line in curve_text(small).splitlines()]
    assert ["65536", "-", "-", "no", "-", "-"] in lines
    assert small.to_dict()["contexts"][-1]["placement"] is None


def test_tables_fit_a_terminal() -> None:
    text = curve_text(curve_of(dense_model(), laptop(), trained=1 << 20))
    tables = [line for line in text.splitlines() if not line.startswith("Tokens/s")]
    assert max(map(len, tables)) <= 80
    assert [line.split()[0] for line in tables[-len(BATCHES) :]] == [str(batch) for batch in BATCHES]
