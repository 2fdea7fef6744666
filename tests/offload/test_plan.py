"""The plan is a pure function of sizes: what lies where, what reading it costs, and why it doesn't fit."""

from dataclasses import asdict, replace

import pytest

from edgeinfer_offload.plan import Device, Item, MemoryPlan, PlanError, Repacking, plan_memory

MIB = 1 << 20
ITEMS = [
    Item("layer 0", 30 * MIB, 30 * MIB),
    Item("head", 12 * MIB, 12 * MIB),
    Item("workspace", 2 * MIB, 0),
]


def test_every_item_is_placed_with_its_bytes_and_the_time_to_read_it() -> None:
    plan = plan_memory(ITEMS, Device("cpu", 44 * MIB, 10e9))
    assert [(item.item, item.device, item.bytes) for item in plan.items] == [
        ("layer 0", "cpu", 30 * MIB),
        ("head", "cpu", 12 * MIB),
        ("workspace", "cpu", 2 * MIB),
    ]
    assert plan.items[0].ms_per_token == pytest.approx(30 * MIB / 10e9 * 1000)
    assert plan.items[2].ms_per_token == 0
    assert plan.nbytes == 44 * MIB
    assert plan.ms_per_token == pytest.approx(42 * MIB / 10e9 * 1000)


def test_what_does_not_fit_by_a_byte_is_refused_with_all_numbers() -> None:
    with pytest.raises(PlanError) as caught:
        plan_memory(ITEMS, Device("cpu", 44 * MIB - 1))
    assert str(caught.value) == (
        "the model needs 44.0 MiB on the cpu, 44.0 MiB may be used; the largest part is layer 0 with 30.0 MiB"
    )


def test_large_sizes_are_told_in_whole_mebibytes() -> None:
    with pytest.raises(PlanError, match=r"needs 20480 MiB on the cpu, 512 MiB may be used"):
        plan_memory([Item("all", 20480 * MIB, 0)], Device("cpu", 512 * MIB))


def test_the_explanation_is_a_table_with_a_total_and_the_bound() -> None:
    lines = plan_memory(ITEMS, Device("cpu", 100 * MIB, 10e9)).explain().splitlines()
    assert lines[0].split() == ["item", "device", "MiB", "ms/token"]
    assert lines[1].split() == ["layer", "0", "cpu", "30.0", "3.146"]
    assert lines[4].split() == ["total", "44.0", "4.404"]
    assert lines[5] == "cpu: 100 MiB free before loading, read at 10.0 GB/s: at most 227 tokens/s"
    assert len({len(line) for line in lines[:5]}) == 1


@pytest.mark.parametrize("items", [ITEMS, ITEMS[2:], []])
def test_an_explanation_without_a_measurement_promises_no_speed(items: list[Item]) -> None:
    text = plan_memory(items, Device("cpu", 100 * MIB)).explain()
    assert text.endswith("cpu: 100 MiB free before loading")


def test_a_plan_that_reads_nothing_promises_no_speed() -> None:
    plan: MemoryPlan = plan_memory(ITEMS[2:], Device("cpu", 100 * MIB, 10e9))
    assert plan.explain().endswith("cpu: 100 MiB free before loading")


def test_what_stays_in_the_file_takes_no_budget_and_is_told() -> None:
    items = [Item("layer 0", 30 * MIB, 30 * MIB, mapped=True), ITEMS[2]]
    plan = plan_memory(items, Device("cpu", 40 * MIB, 10e9))
    assert [(item.item, item.device) for item in plan.items] == [("layer 0", "file"), ("workspace", "cpu")]
    assert (plan.nbytes, plan.file_bytes) == (2 * MIB, 30 * MIB)
    assert plan.explain().splitlines()[-1] == "file: 30.0 MiB stay in its memory map"
    with pytest.raises(PlanError, match=r"needs 2\.0 MiB .* the largest part is workspace"):
        plan_memory(items, Device("cpu", 1 * MIB))


def test_a_file_that_memory_can_not_hold_is_remarked_on() -> None:
    plan = plan_memory([Item("layer 0", 30 * MIB, 30 * MIB, mapped=True)], Device("cpu", 10 * MIB))
    assert plan.explain().splitlines()[-1] == (
        "file: 30.0 MiB stay in its memory map, 10.0 MiB of memory are left for it: the rest is read again "
        "from the disk for every token"
    )


@pytest.mark.parametrize(
    ("repacking", "line"),
    [
        (
            Repacking(200 * MIB, 0.25, True),
            "repacked 200 MiB in 0.25 s (0.8 GB/s); the file's pages were released",
        ),
        (
            Repacking(200 * MIB, 0.25, False),
            "repacked 200 MiB in 0.25 s (0.8 GB/s); the file's pages stay mapped",
        ),
        (Repacking(0, 0.0, False), "nothing was repacked: the weights are read from the file's memory map"),
    ],
)
def test_what_repacking_cost_is_told_and_recorded(repacking: Repacking, line: str) -> None:
    plan = replace(plan_memory(ITEMS, Device("cpu", 100 * MIB)), repacking=repacking)
    assert plan.explain().splitlines()[-1] == line
    assert asdict(plan)["repacking"] == asdict(repacking)
