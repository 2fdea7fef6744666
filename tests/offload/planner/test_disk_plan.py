"""What is read from the disk if main memory is too small: the way that takes the least time per token."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.cpu.layout.packed_matrix import interleaved_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Disk, Machine
from edgeinfer_offload.planner.disk_plan import plan_from_disk, seconds_with_draft
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import READ_AHEAD, PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.planner.sparse_types import BundledLayer, BundledOptions, SparseLayer
from tests.offload.model_shapes import GIB, PLAN_OPTIONS, cpu_only, dense_model, feed_forward

NEURONS, LAYERS = 14336, 32
RAMS = (2.5, 2.8, 3.2, 4.0)
DISK = Disk(2e9, 10e-6)
OPTIONS = replace(PLAN_OPTIONS, device="cpu", streamed=True)


def machine(ram: float, disk: Disk = DISK) -> Machine:
    here = cpu_only()
    return replace(here, processor=replace(here.processor, free_bytes=int(ram * GIB)), disk=disk)


def bundled(named: float, cover: tuple[float, ...] = ()) -> BundledOptions:
    held = sum(map(interleaved_bytes, feed_forward(4096, NEURONS, "Q4_K").matrices()))
    sparse = SparseLayer(held, round(named * held), round(named * held), held // 100, held)
    each = BundledLayer(sparse, held // 30, held // NEURONS, held // NEURONS, NEURONS, named, cover)
    return BundledOptions(dict.fromkeys(range(LAYERS), each), 0, 0)


def planned(
    ram: float,
    options: PlanOptions = OPTIONS,
    of: BundledOptions | None = None,
    disk: Disk = DISK,
    drafts: tuple[ModelSizes | None, ...] = (None,),
    *,
    only_sparse: bool = False,
) -> MemoryPlan:
    return plan_from_disk(dense_model(), machine(ram, disk), options, drafts, of, only_sparse=only_sparse)


def test_blocks_are_read_ahead_at_the_rate_of_the_disk_within_the_budget() -> None:
    plan = planned(2.5)
    assert plan.reads_ahead
    assert plan.bytes_on("cpu") <= 2.5 * GIB
    buffers = next(item.bytes for item in plan.items if item.item == READ_AHEAD)
    assert buffers == pytest.approx(
        2 * sum(m.nbytes for m in feed_forward(4096, NEURONS, "Q4_K").matrices()), 0.01
    )
    spilled = [item for item in plan.items if item.device == "disk" and item.weights_read and item.layer]
    assert sum(item.ms_per_token for item in spilled) == pytest.approx(
        1000 * sum(item.bytes for item in spilled) / 2e9, 0.01
    )


def test_what_the_page_cache_holds_is_mapped_instead() -> None:
    plan = plan_from_disk(
        dense_model(), machine(24), replace(OPTIONS, ram=2 * GIB), (None,), None, only_sparse=False
    )
    assert plan.options.disk
    assert not plan.reads_ahead


def test_active_neurons_are_read_if_that_is_faster_and_blocks_if_they_are_many() -> None:
    few, many = planned(2.5, of=bundled(0.05)), planned(2.5, of=bundled(0.8))
    assert few.options.sparse is not None
    assert few.options.sparse.window_slots > 64
    assert many.options.sparse is None
    assert few.ms_per_token < many.ms_per_token
    slow = planned(2.5, of=bundled(0.05), disk=Disk(2e9, 1e-3))
    assert slow.options.sparse is None


def test_the_window_is_what_the_budget_leaves_and_reads_fall_with_it() -> None:
    cover = tuple(1 - (1 - n / 64) ** 3 for n in range(65))
    plans = [planned(ram, of=bundled(0.05, cover), only_sparse=True) for ram in RAMS]
    slots = [plan.options.sparse.window_slots for plan in plans if plan.options.sparse]
    assert slots == sorted(slots)
    assert all(plan.bytes_on("cpu") <= ram * GIB for plan, ram in zip(plans, RAMS, strict=True))
    times = [plan.ms_per_token for plan in plans]
    assert times == sorted(times, reverse=True)


def test_a_window_that_holds_all_neurons_reads_none() -> None:
    layer = bundled(0.1).layers[0]
    assert layer.with_slots(NEURONS).disk_reads == 0
    assert layer.with_slots(10).disk_reads == pytest.approx(0.1 * NEURONS)
    assert 0 < layer.with_slots(NEURONS // 2).disk_reads < 0.1 * NEURONS


def test_a_draft_model_is_taken_if_accepted_tokens_are_faster_with_it() -> None:
    small = dense_model(4, 1024, 4096, vocabulary=32000)
    plan = planned(3, drafts=(None, small))
    assert plan.draft == "cpu"
    assert seconds_with_draft(plan) < seconds_with_draft(planned(3))
    large = dense_model(16, 4096, 14336)
    assert planned(4, drafts=(None, large)).draft is None


def test_nothing_that_fits_is_an_error_with_the_missing_bytes() -> None:
    with pytest.raises(PlanError, match="main memory can't hold what is needed besides the neurons"):
        planned(0.5, of=bundled(0.05), only_sparse=True)
    with pytest.raises(PlanError, match="the model needs"):
        planned(0.01)
    assert plan_memory(dense_model(), machine(24), OPTIONS).options.disk is False


def test_all_weights_are_mapped_if_that_is_faster_and_none_can_be_read_ahead() -> None:
    slow = replace(OPTIONS, streamed=False)
    little, much = planned(2.5, slow), planned(4.6, slow)
    assert (little.options.repack, little.options.disk) == (False, False)
    assert (much.options.repack, much.options.disk) == (True, True)
    assert planned(2.5).options.repack
    for ram, chosen in ((2.5, little), (4.6, much)):
        for way in (replace(slow, disk=True), replace(slow, repack=False)):
            assert chosen.ms_per_token <= plan_memory(dense_model(), machine(ram), way).ms_per_token
