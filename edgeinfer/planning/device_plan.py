"""The device plan, used by `load` and `edgeinfer plan`: which devices run a model, and where its
bytes are.
"""

from dataclasses import replace
from functools import partial

from edgeinfer.errors import Detail, OutOfMemoryError
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.one_gpu import plan_on_gpu
from edgeinfer.planning.parallel_sequences import automatic_sequences
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.planned_devices import DevicePlan, Measured, out_of_memory, plan_options
from edgeinfer.planning.several_gpus import plan_on_gpus
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.disk_plan import plan_from_disk
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import largest_context, plan_memory

GIB = 1 << 30
NO_DRAFT = Detail("not enough memory for the draft model; using prompt lookup instead")


def plan_devices(
    request: PlanRequest, machine: Machine, measured: Measured = lambda machine: machine
) -> DevicePlan:
    """All on the GPU if it fits; else split between GPU and CPU if that is faster; else all on the CPU, with
    the reason in the plan's `limit_reason`.

    `measured`: adds the speeds that a split needs to `machine`.

    Raises:
        OutOfMemoryError: nothing fits; the text has the numbers, and a context that would fit.
        GpuUnavailableError: "cuda" was requested, and no part can run there.
    """
    if request.device == "cpu" or machine.graphics is None:
        return _on_cpu(request, machine, measured)
    if len(machine.gpus) > 1:
        try:
            return plan_on_gpus(request, machine, measured)
        except GpuUnavailableError as error:
            if request.device != "auto":
                raise
            planned = plan_devices(request, replace(machine, gpus=machine.gpus[:1]), measured)
            return replace(planned, warnings=(f"planned for one GPU: {error}", *planned.warnings))
    try:
        return plan_on_gpu(request, machine, measured)
    except GpuUnavailableError as error:
        if request.device != "auto":
            raise
        planned = _on_cpu(request, machine, measured)
        return replace(planned, memory=replace(planned.memory, limit_reason=str(error)))


def with_one_gib_more(request: PlanRequest, machine: Machine, planned: DevicePlan) -> MemoryPlan:
    """The plan, with the predicted decode speed at one GiB more of GPU memory, from a second plan."""
    graphics = machine.graphics
    if (
        graphics is None
        or request.device == "cpu"
        or planned.memory.placement == "gpu"
        or len(machine.gpus) > 1
    ):
        return planned.memory
    more = replace(
        graphics,
        total_bytes=graphics.total_bytes + GIB,
        free_bytes=graphics.free_bytes + GIB,
    )
    vram = None if request.vram is None else request.vram + GIB
    try:
        planned_with_more = plan_devices(replace(request, vram=vram), machine.with_gpu(more))
    except (OutOfMemoryError, GpuUnavailableError):
        return planned.memory
    return replace(
        planned.memory, rate_with_one_gib_more=planned_with_more.memory.prediction.decode_tokens_per_second
    )


def _on_cpu(request: PlanRequest, machine: Machine, measured: Measured) -> DevicePlan:
    options = replace(plan_options(request), device="cpu", sparse=request.sparse)
    plan_with = partial(plan_memory, request.sizes, machine)
    options = replace(options, sequences=automatic_sequences(request, options, plan_with))
    fitting = largest_context(request.sizes, machine, options, request.trained_context)
    try:
        plan = plan_memory(request.sizes, machine, options)
    except PlanError as error:
        is_dense = not request.sparse_required or request.bundled is not None
        if fitting or not is_dense or not request.repack:
            raise out_of_memory(request, error, fitting) from error
        return _on_cpu_with_disk(request, machine, options, measured)
    if request.draft is None or request.draft_required:
        return DevicePlan(plan, fitting)
    try:
        drafting = replace(options, draft=request.draft)
        return DevicePlan(plan_memory(request.sizes, machine, drafting), fitting)
    except PlanError:
        return DevicePlan(plan, fitting, (NO_DRAFT,))


def _on_cpu_with_disk(
    request: PlanRequest, machine: Machine, options: PlanOptions, measured: Measured
) -> DevicePlan:
    """The fastest CPU plan of a model whose weights main memory can't hold at any context."""
    drafts = [options.draft] if request.draft is None or request.draft_required else [None, request.draft]
    only_sparse, bundled = request.sparse_required, request.bundled
    try:
        plan = plan_from_disk(
            request.sizes, measured(machine), options, drafts, bundled, only_sparse=only_sparse
        )
    except PlanError as error:
        raise out_of_memory(request, error, 0) from error
    return DevicePlan(plan, 0, (NO_DRAFT,) if request.draft and plan.draft is None else ())
