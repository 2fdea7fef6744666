"""The plan of a model that the CPU's main memory can't hold: what is read from the disk, and when."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import DRAFTS, PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.planner.sparse_types import MIN_WINDOW_SLOTS, BundledOptions

DRAFTED = 4
"""Tokens that a step gives with a draft model, as DRAFT_READS assumes: three are accepted."""


def plan_from_disk(
    sizes: ModelSizes,
    machine: Machine,
    options: PlanOptions,
    drafts: Sequence[ModelSizes | None],
    bundled: BundledOptions | None,
    *,
    only_sparse: bool,
) -> MemoryPlan:
    """The plan that takes the least time per token: some blocks are on disk and read by each token, or the
    neurons are, and only the active ones are read; with one of the draft models in memory, or None. Without
    one, all weights may be mapped, if they can't be read ahead.

    `only_sparse`: the neurons must be on disk.

    Raises:
        PlanError: none fits.
    """
    plans = list[MemoryPlan]()
    refusal = PlanError("main memory can't hold what is needed besides the neurons")
    for draft in drafts:
        each = replace(options, draft=draft)
        ways = [with_window(sizes, machine, each, bundled)] if bundled else []
        if not only_sparse:
            ways.append(replace(each, disk=True, sparse=None))
        if not only_sparse and draft is None and not options.streamed:
            ways.append(replace(each, repack=False, sparse=None))
        for way in filter(None, ways):
            try:
                plans.append(plan_memory(sizes, machine, way))
            except PlanError as error:
                refusal = error
    if not plans:
        raise refusal
    return min(plans, key=seconds_with_draft)


def with_window(
    sizes: ModelSizes, machine: Machine, options: PlanOptions, bundled: BundledOptions
) -> PlanOptions | None:
    """The options with the largest windows of neurons that fit; None: two blocks of neurons don't."""
    free = machine.processor.free_bytes
    allowed = free if options.ram is None else min(free, options.ram)
    unlimited = replace(machine, processor=replace(machine.processor, free_bytes=max(free, 4 * sizes.nbytes)))
    try:
        plan = plan_memory(sizes, unlimited, replace(options, sparse=bundled.with_slots(0), ram=None))
    except PlanError:
        return None
    slots = bundled.slots_in(allowed - plan.bytes_on("cpu"))
    return replace(options, sparse=bundled.with_slots(slots)) if slots >= MIN_WINDOW_SLOTS else None


def seconds_with_draft(plan: MemoryPlan) -> float:
    """Seconds of a token; with a draft model those of one that is accepted, as its step gives several."""
    if plan.draft is None:
        return plan.prediction.seconds
    drafting = sum(item.ms_per_token for item in plan.items if item.item in DRAFTS) / 1000
    return plan.prediction.seconds / DRAFTED + drafting
