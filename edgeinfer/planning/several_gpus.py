"""Plans a model on several GPUs: on one of them, a part of every layer on each, or consecutive layers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from edgeinfer.errors import Detail
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.one_gpu import NO_HEAD, plan_whole_on_gpu, with_draft_head
from edgeinfer.planning.parallel_sequences import gpu_options, sequence_notes
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.planned_devices import DevicePlan, Measured, plan_options, split_plan_options
from edgeinfer_kernels.caches.cache_types import is_for_cpu
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.several_gpus.pipeline_plan import plan_pipeline, plan_pipeline_with_cpu
from edgeinfer_offload.planner.several_gpus.tensor_plan import plan_tensor

HEAD_ON_LAYERS = (
    "this draft head reads hidden states or caches of layers that are on other GPUs: using prompt lookup "
    "instead; device='cuda:0' uses the head if that GPU holds the model"
)
BLOCKS = (
    "tensor parallel has no block drafters: using prompt lookup instead; device='cuda:0' uses the drafter if "
    "that GPU holds the model"
)
SEVERAL_QUEUE = Detail("requests run one at a time: consecutive layers on several GPUs have no batches")
MAX_TENSOR_RATIO = 0.9
"""Tensor parallel must take at most this much of the time of one GPU or of layers, unless requested."""


def plan_on_gpus(request: PlanRequest, machine: Machine, measured: Measured) -> DevicePlan:
    """All on the GPU that is fastest alone, or consecutive layers on each GPU, with the CPU if need be."""
    if is_for_cpu(request.kv):
        raise GpuUnavailableError(
            f"{request.name}: on several GPUs: kv {request.kv} runs on the CPU only; take f16, fp8, q8_0 or "
            "q4_0 (kv=)"
        )
    given = request.vram_of_each or (None,)
    budgets = given if len(given) == len(machine.gpus) else (given[0],) * len(machine.gpus)
    tensor = None if request.split == "layers" else _divided(request, machine, budgets)
    if tensor is not None and request.split == "tensor":
        return tensor
    alone = _alone(request, machine, budgets)
    if alone is not None:
        if tensor is not None and _is_faster(tensor.memory, alone.memory):
            return tensor
        index = alone.memory.machine.gpus[0].index
        note = f"all of the model is on cuda:{index}: tokens pass GPUs one after another, so one is faster"
        return alone.noted(Detail(note))
    if refused := _refused_by_layers(request):
        if tensor is not None:
            return tensor
        raise GpuUnavailableError(
            f"{request.name}: consecutive layers on several GPUs take no {refused}; take split='tensor' or "
            "device='cuda:0'"
        )
    try:
        layers = _with_head(request, lambda own: _on_gpus(own, machine, budgets))
    except PlanError:
        return _with_head(request, lambda own: _on_gpus_and_cpu(own, measured(machine), budgets))
    return tensor if tensor is not None and _is_faster(tensor.memory, layers.memory) else layers


def _refused_by_layers(request: PlanRequest) -> str:
    """What of the request consecutive layers on several GPUs don't take; "": they take all."""
    if request.lora is not None:
        return "adapters (lora=)"
    draft = request.required_draft
    return "draft model (draft=)" if draft is not None and not draft.is_draft_head else ""


def _with_head(request: PlanRequest, plan: Callable[[PlanRequest], DevicePlan]) -> DevicePlan:
    """The `plan` of consecutive layers, with a required draft head on the last GPU if possible. Raises
    `PlanError`.
    """
    head = request.required_draft
    if head is None:
        return plan(replace(request, draft=None))
    if head.reads_between(len(request.sizes.layers)):
        return with_draft_head(request, plan, None, HEAD_ON_LAYERS)
    return with_draft_head(request, plan, head.as_head_of_split(request.sizes), NO_HEAD)


def _alone(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan | None:
    """The plan of the GPU on which the whole model decodes fastest; None: it fits none."""
    plans: list[DevicePlan] = []
    for gpu, vram in zip(machine.gpus, budgets, strict=True):
        with suppress(PlanError):
            plans.append(plan_whole_on_gpu(replace(request, vram=vram), replace(machine, gpus=(gpu,))))
    return min(plans, key=lambda each: each.memory.prediction.seconds, default=None)


def _divided(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan | None:
    """The plan of tensor parallel; None: there is none. Raises `GpuUnavailableError` if it was requested."""

    def planned(own: PlanRequest) -> DevicePlan:
        options = replace(plan_options(own), device="gpu", repack=True)
        options = gpu_options(own, options, plan)
        return DevicePlan(plan(options), own.context, sequence_notes(own, options))

    def plan(options: PlanOptions) -> MemoryPlan:
        return plan_tensor(request.sizes, machine, options, budgets)

    head, note = request.draft, NO_HEAD
    if head is not None:
        head, note = (None, BLOCKS) if head.drafts_blocks else (head.as_head_of_ranks(request.sizes), NO_HEAD)
    try:
        return with_draft_head(request, planned, head, note)
    except PlanError as error:
        if request.split == "auto":
            return None
        raise GpuUnavailableError(f"{request.name}: tensor parallel: {error}; take split='layers'") from error


def _is_faster(tensor: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether tensor parallel is predicted to be clearly faster; without measured speeds it isn't."""
    if "unmeasured" in (tensor.machine.origin, other.machine.origin):
        return False
    return tensor.prediction.seconds < MAX_TENSOR_RATIO * other.prediction.seconds


def _on_gpus(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan:
    """Consecutive layers on each GPU. Raises `PlanError`."""
    options = replace(plan_options(request), device="gpu", repack=True)
    plan = plan_pipeline(request.sizes, machine, options, budgets)
    return DevicePlan(plan, request.context, _several_notes(request))


def _on_gpus_and_cpu(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan:
    """As `plan_on_gpus`, where the first GPU shares its layers with the CPU."""
    options = split_plan_options(request)
    try:
        plan = plan_pipeline_with_cpu(request.sizes, machine, options, budgets)
    except PlanError as error:
        raise GpuUnavailableError(f"{request.name}: on several GPUs and the CPU: {error}") from error
    return DevicePlan(plan, request.context, _several_notes(request))


def _several_notes(request: PlanRequest) -> tuple[str, ...]:
    """What the user should know about consecutive layers on several GPUs."""
    return () if request.parallel == 1 else (SEVERAL_QUEUE,)
