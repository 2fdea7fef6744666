"""Plans of tensor parallel: shares by speed and memory, time with sums, and refusals."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.sizes.tensor_sizes import tensor_sizes
from edgeinfer_kernels.stages import Device
from edgeinfer_offload.machine.description import describe_machine
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.machine.peer_sums import NVLINK, PCIE
from edgeinfer_offload.planner.memory_plan import PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.planner.several_gpus.tensor_plan import SUMS, plan_tensor
from tests.offload.model_shapes import dense_model, moe_model, with_shared_caches

GIB = 1 << 30
OPTIONS = PlanOptions(context=4096)
FREE = (None, None)


def machine(*cards: str) -> Machine:
    described = [describe_machine(card) for card in cards]
    gpus = [replace(one.gpus[0], index=index) for index, one in enumerate(described)]
    return replace(described[0], gpus=tuple(gpus))


def test_two_equal_cards_read_half_each_and_add_up_after_each_block() -> None:
    sizes, here = dense_model(), describe_machine("2x h200")
    one = plan_memory(sizes, machine("h200"), replace(OPTIONS, device="gpu"))
    plan = plan_tensor(sizes, here, OPTIONS, FREE)
    assert plan.shares == (0.5, 0.5)
    assert plan.devices == (Device("gpu"), Device("gpu", 1))
    assert plan.bytes_on("gpu") == plan.bytes_on("gpu1")
    assert (plan.placement, plan.gpu_layers, plan.layers[0].neurons) == ("gpu", 32, 14336)
    (sums,) = (item for item in plan.items if item.item == SUMS)
    launch = here.gpus[0].launch_seconds
    assert sums.ms_per_token == pytest.approx(64 * 1000 * (NVLINK.sum_seconds + launch))
    slowest = max(part.ms_per_token for part in plan.parts)
    assert plan.ms_per_token == pytest.approx(slowest + sums.ms_per_token)
    read = [part.weight_bytes_per_token for part in plan.parts]
    assert sum(read) == pytest.approx(one.weight_bytes_per_token, rel=1e-3)  # vectors are on both
    assert "2 GPUs" in plan.explain()
    assert plan.to_dict()["machine"]["peers"]["name"] == "NVLink"


def test_the_faster_card_gets_more_of_every_layer() -> None:
    here = replace(machine("rtx 4090", "rtx 3060 12GB"), peers=PCIE)
    plan = plan_tensor(dense_model(), here, OPTIONS, FREE)
    assert plan.shares[0] > 0.6
    assert plan.parts[0].weight_bytes_per_token > plan.parts[1].weight_bytes_per_token
    even = [part.prediction.seconds for part in plan.parts]
    assert max(even) < 1.6 * min(even)


def test_budgets_limit_the_shares() -> None:
    plan = plan_tensor(dense_model(), describe_machine("2x h200"), OPTIONS, (9 * GIB, 3 * GIB))
    assert plan.shares[0] > plan.shares[1]
    assert plan.bytes_on("gpu1") <= 3 * GIB


def test_a_budget_below_the_buffers_of_communication_is_not_shown_as_negative() -> None:
    with pytest.raises(PlanError, match=r"on the gpu, 0\.0 MiB may be used"):
        plan_tensor(dense_model(), describe_machine("2x h200"), OPTIONS, (100 << 20, 100 << 20))


def test_experts_are_divided() -> None:
    plan = plan_tensor(moe_model(), describe_machine("2x h200"), OPTIONS, FREE)
    assert plan.layers[-1].experts == len(plan.layers[-1].gpu_experts) > 0


@pytest.mark.slow
def test_a_slow_link_makes_it_slower() -> None:
    sizes = dense_model()
    fast = plan_tensor(sizes, describe_machine("2x rtx 3090, nvlink"), OPTIONS, FREE)
    slow = plan_tensor(sizes, describe_machine("2x rtx 3090"), OPTIONS, FREE)
    difference = 64 * 1000 * (PCIE.sum_seconds - NVLINK.sum_seconds)
    assert slow.ms_per_token - fast.ms_per_token == pytest.approx(difference)
    assert slow.prediction.prompt_seconds > fast.prediction.prompt_seconds


def test_what_cannot_be_divided_is_refused() -> None:
    here = describe_machine("2x h200")
    with pytest.raises(PlanError, match="layers read keys, values or inputs of other layers"):
        plan_tensor(with_shared_caches(dense_model(), 4), here, OPTIONS, FREE)
    with pytest.raises(PlanError, match="8 key heads can't be divided among 16 GPUs"):
        plan_tensor(dense_model(), describe_machine("16x h200"), OPTIONS, (None,) * 16)
    with pytest.raises(PlanError, match="it takes Linux, and torch with NCCL"):
        plan_tensor(dense_model(), replace(here, peers=None), OPTIONS, FREE)
    with pytest.raises(PlanError, match="the model needs"):
        plan_tensor(dense_model(), here, OPTIONS, (GIB, GIB))


def test_the_sizes_of_the_parts_add_up() -> None:
    sizes = dense_model()
    parts = [tensor_sizes(sizes, (3, 1), rank) for rank in range(2)]
    assert sum(part.head.rows for part in parts) == sizes.vocabulary
    assert [part.blocks[0].spec.kv_heads for part in parts] == [6, 2]  # type: ignore[attr-defined]
    assert [part.blocks[1].granules for part in parts] == [10752, 3584]  # type: ignore[attr-defined]
