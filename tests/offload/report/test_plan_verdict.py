"""The verdict on a plan: one line of at most 80 columns, with the placement, the memory and the speed."""

from dataclasses import replace

import pytest

from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.report.plan_comparison import comparison_text
from edgeinfer_offload.report.plan_verdict import binary_size, plan_verdict, shown_rate, size_of
from edgeinfer_offload.report.table import aligned
from tests.offload.model_shapes import (
    GIB,
    MIB,
    PLAN_OPTIONS,
    cpu_only,
    dense_model,
    laptop,
    moe_model,
    planned,
)


def mapped() -> MemoryPlan:
    return planned(dense_model(), 0, ram=3 * GIB, disk=True)


def from_disk() -> MemoryPlan:
    return plan_memory(dense_model(), cpu_only(ram=3 * GIB), replace(PLAN_OPTIONS, device="cpu", disk=True))


@pytest.mark.parametrize(
    ("plan", "placement", "text"),
    [
        (
            planned(dense_model(), 8),
            "gpu",
            "Fits. 32 of 32 layers on the GPU, 6.2 of 8 GiB, about 44 tokens/s",
        ),
        (
            planned(dense_model(), 4),
            "split",
            "Fits, split. 60% of the weights on the GPU, 4.0 of 4 GiB, about 19 tokens/s",
        ),
        (
            plan_memory(dense_model(), cpu_only(), PLAN_OPTIONS),
            "cpu",
            "Fits. 32 of 32 layers on the CPU, 5.1 of 24 GiB, about 9.2 tokens/s",
        ),
        (
            mapped(),
            "cpu",
            "Fits. 32 of 32 layers on the CPU, memory-mapped, 2.9 of 3 GiB, about 4.6 tokens/s",
        ),
        (
            from_disk(),
            "disk",
            "Doesn't fit. 2.21 GiB of weights stay on disk, about 0.46 tokens/s",
        ),
    ],
    ids=["gpu", "split", "cpu", "mapped", "disk"],
)
def test_the_verdict_names_placement_memory_and_speed(plan: MemoryPlan, placement: str, text: str) -> None:
    assert plan.placement == placement
    assert plan_verdict(plan) == text
    assert plan.explain().splitlines()[:2] == [text, ""]
    fields = plan.to_dict()["verdict"]
    assert (fields["text"], fields["placement"], fields["layers"]) == (text, placement, 32)


def test_without_measurements_the_verdict_has_no_speed() -> None:
    machine = replace(cpu_only(), origin="unmeasured")
    text = plan_verdict(plan_memory(dense_model(), machine, PLAN_OPTIONS))
    assert text == "Fits. 32 of 32 layers on the CPU, 5.1 of 24 GiB"


def test_experts_in_both_memories_count_once() -> None:
    plan, cached = (
        planned(moe_model(), 8, expert_cache=cache, context=4096, depth=2048) for cache in (False, True)
    )
    assert any(layer.expert_cache for layer in cached.layers)
    experts = sum(len(layer.gpu_experts) / layer.experts for layer in cached.layers) / len(cached.layers)
    assert 0.2 < experts < cached.gpu_weight_share < experts + 0.1
    assert not any(layer.expert_cache for layer in plan.layers)
    held = [item for item in cached.items if item.weights_read and item.device == "cpu"]
    assert sum(item.bytes for item in held) > (1 - cached.gpu_weight_share) * dense_bytes(cached)


def dense_bytes(plan: MemoryPlan) -> int:
    """Bytes of all weights, of which those of experts on both devices count once."""
    doubled = sum(
        item.bytes * len(plan.layers[item.layer].gpu_experts) / plan.layers[item.layer].experts
        for item in plan.items
        if item.device == "cpu" and item.layer is not None and "all for" in item.item
    )
    return int(sum(item.bytes for item in plan.items if item.weights_read) - doubled)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 MiB"),
        (int(7.34 * MIB), "7.3 MiB"),
        (int(99.96 * MIB), "100 MiB"),
        (1023 * MIB, "1023 MiB"),
        (GIB, "1.00 GiB"),
        (8178 * MIB, "7.99 GiB"),
        (int(16.44 * GIB), "16.4 GiB"),
        (300 * GIB, "300 GiB"),
    ],
)
def test_sizes_have_three_digits_in_gib_from_one_on(nbytes: int, text: str) -> None:
    assert binary_size(nbytes) == text


def test_small_parts_of_a_large_memory_keep_their_unit() -> None:
    assert size_of(45 * MIB, 8 * GIB) == "45.0 MiB of 8.00 GiB"
    assert size_of(6 * GIB, 8 * GIB) == "6.0 of 8 GiB"
    assert size_of(6 * GIB, int(21.44 * GIB)) == "6.0 of 21.4 GiB"


def test_rates_are_rounded_to_digits() -> None:
    assert [shown_rate(rate) for rate in (1234.5, 99.96, 44.23, 0.8123)] == ["1234", "100", "44.2", "0.812"]
    assert [shown_rate(rate, digits=2) for rate in (44.23, 9.96, 0.8123)] == ["44", "10", "0.81"]


def test_a_long_first_cell_continues_in_the_next_line() -> None:
    lines = aligned([("name", "on"), ("several short words in a row", "gpu"), ("one", "cpu")], {1}, 20)
    assert lines == [
        "name              on",
        "several short    gpu",
        "  words in a",
        "  row",
        "one              cpu",
    ]
    assert aligned([("a", "bc"), ("abc", "b")]) == ["a    bc", "abc  b"]


def test_machines_are_compared_in_their_order() -> None:
    plans: dict[str, MemoryPlan | str] = {
        "large": planned(dense_model(), 8),
        "small": "the model needs more",
        "": planned(moe_model(), 2),
    }
    rows = [" ".join(line.split()) for line in comparison_text(plans).splitlines()]
    assert rows[1].startswith("large on the GPU 6.2 of 8 GiB 43.5 ")
    assert rows[2] == "small no - - -"
    assert rows[3].startswith("split 2.0 of 2 GiB ")
    assert rows[5] == "small: the model needs more"


@pytest.mark.slow
def test_no_row_of_a_plan_is_wider_than_a_terminal() -> None:
    machines = [laptop(), laptop(4 * GIB), laptop(2 * GIB), cpu_only()]
    for machine in machines:
        for model in (dense_model(), moe_model(shared=True)):
            options = PlanOptions(8192, expert_cache=True)
            for details in (False, True):
                text = plan_memory(model, machine, options).explain(details, verbose=False)
                assert max(map(len, text.splitlines())) <= 80
