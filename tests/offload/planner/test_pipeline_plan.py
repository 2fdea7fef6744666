"""Layers over several GPUs: divisions by time and budget, joined plans, refusals."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.stages import Device
from edgeinfer_offload.machine.description import describe_machine
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.planner.several_gpus.pipeline_plan import (
    HOP,
    layer_counts,
    plan_pipeline,
    plan_pipeline_with_cpu,
)
from tests.offload.model_shapes import dense_model

GIB = 1 << 30
OPTIONS = PlanOptions(context=4096)


def machine(*cards: str) -> Machine:
    described = [describe_machine(card) for card in cards]
    gpus = [replace(one.gpus[0], index=index) for index, one in enumerate(described)]
    return replace(described[0], gpus=tuple(gpus))


@pytest.mark.slow
def test_equal_cards_that_hold_it_together_share_the_layers() -> None:
    sizes = dense_model()
    need = plan_memory(sizes, machine("h200"), replace(OPTIONS, device="gpu")).bytes_on("gpu")
    half = int(0.62 * need)
    with pytest.raises(PlanError):
        plan_memory(sizes, machine("h200"), replace(OPTIONS, device="gpu", vram=half))
    plan = plan_pipeline(sizes, machine("h200", "h200"), OPTIONS, (half, half))
    assert sum(layer_counts(plan)) == len(sizes.layers)
    assert plan.bytes_on("gpu") <= half
    assert plan.bytes_on("gpu1") <= half
    assert [stage.device for stage in plan.stages] == [Device("gpu"), Device("gpu", 1)]
    assert (plan.placement, plan.head, plan.gpu_layers) == ("gpu", "gpu1", len(sizes.layers))
    assert "on 2 GPUs" in plan.explain()


def test_the_faster_card_gets_as_many_layers_as_it_holds() -> None:
    sizes = dense_model()
    budgets = (4 * GIB, 4 * GIB)
    fast_first = plan_pipeline(sizes, machine("h200", "rtx 3060 12GB"), OPTIONS, budgets)
    fast_last = plan_pipeline(sizes, machine("rtx 3060 12GB", "h200"), OPTIONS, budgets)
    assert layer_counts(fast_first)[0] > layer_counts(fast_first)[1]
    assert layer_counts(fast_last)[1] > layer_counts(fast_last)[0]
    for plan in (fast_first, fast_last):
        fewer, more = sorted(layer_counts(plan))
        assert fewer + more == len(sizes.layers)


def test_unequal_budgets_get_unequal_shares() -> None:
    plan = plan_pipeline(dense_model(), machine("h200", "h200"), OPTIONS, (5 * GIB, 2 * GIB))
    counts = layer_counts(plan)
    assert counts[0] > counts[1]
    assert plan.bytes_on("gpu1") <= 2 * GIB


@pytest.mark.slow
def test_three_cards_hold_what_two_do_not() -> None:
    sizes, budgets = dense_model(), (2800 << 20,) * 3
    with pytest.raises(PlanError, match=r"the model's weights have .* they don't fit 2 GPUs"):
        plan_pipeline(sizes, machine("h200", "h200"), OPTIONS, budgets[:2])
    plan = plan_pipeline(sizes, machine("h200", "h200", "h200"), OPTIONS, budgets)
    assert len(layer_counts(plan)) == 3
    assert sum(item.item == HOP for item in plan.items) == 2


@pytest.mark.slow
def test_a_token_takes_the_sum_of_the_parts_and_the_hops() -> None:
    plan = plan_pipeline(dense_model(), machine("h200", "h200"), OPTIONS, (4 * GIB, 4 * GIB))
    total = sum(item.ms_per_token for item in plan.items if not item.overlapped)
    assert total == pytest.approx(plan.ms_per_token)
    layers = [item.layer for item in plan.items if item.layer is not None]
    assert set(layers) == set(range(len(plan.layers)))
    assert all(item.item.startswith(f"layer {item.layer} ") for item in plan.items if item.layer is not None)
    assert plan.limit_reason is not None
    assert "layers 0-" in plan.limit_reason
    assert plan.to_dict()["bytes"]["gpu1"] == plan.bytes_on("gpu1")


def test_what_two_gpus_do_not_hold_is_shared_with_the_cpu() -> None:
    sizes, budgets = dense_model(), (2 * GIB, 3 * GIB)
    with pytest.raises(PlanError):
        plan_pipeline(sizes, machine("h200", "h200"), OPTIONS, budgets)
    plan = plan_pipeline_with_cpu(sizes, machine("h200", "h200"), OPTIONS, budgets)
    assert (plan.placement, plan.head, sum(layer_counts(plan))) == ("split", "gpu1", len(sizes.layers))
    assert 0.9 * 3 * GIB < plan.bytes_on("gpu1") <= 3 * GIB
    assert plan.bytes_on("gpu") <= 2 * GIB
    assert plan.bytes_on("cpu") > GIB
    assert plan.limit_reason is not None
    assert "(cuda:0) and the CPU, layers" in plan.limit_reason
    one = plan_memory(sizes, machine("h200"), replace(OPTIONS, vram=budgets[0]))
    assert plan.ms_per_token < one.ms_per_token
