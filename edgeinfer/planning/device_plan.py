"""The device plan, used by `load` and `edgeinfer plan`: which devices run a model, and where its
bytes are.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from edgeinfer.errors import Detail, OutOfMemoryError
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.parallel_sequences import (
    automatic_sequences,
    gpu_options,
    sequence_notes,
    split_options,
)
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer_kernels.caches.cache_types import is_for_cpu
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.disk_plan import plan_from_disk
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions, split_batch
from edgeinfer_offload.planner.planner import largest_context, plan_memory
from edgeinfer_offload.planner.several_gpus.pipeline_plan import plan_pipeline, plan_pipeline_with_cpu
from edgeinfer_offload.planner.several_gpus.tensor_plan import plan_tensor
from edgeinfer_offload.planner.sparse_types import SparseOptions

GIB = 1 << 30
NO_DRAFT = Detail("not enough memory for the draft model; using prompt lookup instead")

NO_HEAD = (
    "the GPU has too little memory for the draft head: using prompt lookup instead; device='cpu' or a "
    "smaller context has room for it"
)
NO_STATES = (
    "the GPU has too little memory for the draft head and the attention of all layers, whose hidden states "
    "the head reads: using prompt lookup instead; device='cpu' uses the head"
)
SEVERAL_HEADS = (
    "several draft heads run on the CPU only, with all of their model: using prompt lookup instead; "
    "device='cpu' uses the heads"
)
HEAD_ON_SEVERAL = (
    "tensor parallel has no draft heads: using prompt lookup instead; device='cuda:0' uses the head if that "
    "GPU holds the model"
)
SEVERAL_QUEUE = Detail("requests run one at a time: consecutive layers on several GPUs have no batches")
MAX_TENSOR_RATIO = 0.9
"""Tensor parallel must take at most this much of the time of one GPU or of layers, unless requested."""
MAX_SPARSE_RATIO = 0.9
"""Sparse layers next to a GPU must take at most this much of the time of dense ones, unless requested."""


@dataclass(frozen=True)
class DevicePlan:
    """The result; its `memory.stages` name the devices.

    `fitting`: the largest context with which the model fits. `warnings`: for the user, one line each.
    """

    memory: MemoryPlan
    fitting: int
    warnings: tuple[str, ...] = ()

    def noted(self, note: str) -> "DevicePlan":
        """The same plan with one more warning."""
        return replace(self, warnings=(note, *self.warnings))

    def on(self, sizes: ModelSizes, machine: Machine) -> MemoryPlan:
        """The same placement on a machine with other speeds."""
        return plan_memory(sizes, machine, self.memory.options)


def plan_devices(
    request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine] = lambda machine: machine
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
            return _on_gpus(request, machine, measured)
        except GpuUnavailableError as error:
            if request.device != "auto":
                raise
            planned = plan_devices(request, replace(machine, gpus=machine.gpus[:1]), measured)
            return replace(planned, warnings=(f"planned for one GPU: {error}", *planned.warnings))
    try:
        return _with_gpu(request, machine, measured)
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


def _options(request: PlanRequest) -> PlanOptions:
    return PlanOptions(
        context=request.context,
        kv=request.kv,
        vram=request.vram,
        ram=request.ram,
        repack=request.repack,
        streamed=request.streamed,
        routing=request.routing,
        draft=request.required_draft,
        lora=request.lora,
        batch=request.batch,
        chunk=request.chunk,
    )


def _split_steps(request: PlanRequest) -> PlanOptions:
    """The options for a model that is split between GPU and CPU: both have the tokens of a step."""
    tokens = split_batch(request.kv)
    return replace(_options(request), batch=tokens, chunk=tokens)


def _with_gpu(request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine]) -> DevicePlan:
    if is_for_cpu(request.kv):
        raise GpuUnavailableError(
            f"kv: {request.kv} runs on the CPU only; take f16, fp8, q8_0 or q4_0 on a GPU (kv=)"
        )
    try:
        return _whole_on_gpu(request, machine)
    except PlanError:
        return _split_or_without_head(request, measured(machine))


def _split_or_without_head(request: PlanRequest, machine: Machine) -> DevicePlan:
    """The plan of a model that is split between the GPU and the CPU, with a required draft head on the GPU if
    possible.
    """
    head = request.draft
    if head is None or not head.is_draft_head:
        return _split(request, machine)
    without = replace(request, draft=None, draft_required=False)
    if not request.draft_required:
        return _split(without, machine)
    if not head.has_device_kernels:
        return _split(without, machine).noted(SEVERAL_HEADS)
    with suppress(GpuUnavailableError, OutOfMemoryError):
        planned = _split(replace(request, draft=head.as_head_of_split(request.sizes)), machine)
        if planned.memory.has_gpu_head:
            return planned
    return _split(without, machine).noted(NO_STATES if head.target_layers else NO_HEAD)


def _whole_on_gpu(request: PlanRequest, machine: Machine) -> DevicePlan:
    """All of the model on the GPU, with a required draft head if both fit. Raises `PlanError`: it doesn't
    fit.
    """
    head = request.draft
    if head is None or not head.is_draft_head:
        return _all_on_gpu(request, machine)
    without = replace(request, draft=None, draft_required=False)
    if not request.draft_required:
        return _all_on_gpu(without, machine)
    if not head.has_device_kernels:
        return _all_on_gpu(without, machine).noted(SEVERAL_HEADS)
    with suppress(PlanError):
        planned = _all_on_gpu(request, machine)
        if planned.memory.has_gpu_head:
            return planned
    return _all_on_gpu(without, machine).noted(NO_HEAD)


def _all_on_gpu(request: PlanRequest, machine: Machine) -> DevicePlan:
    sparse = request.sparse if request.sparse_required else None
    whole = replace(_options(request), device="gpu", repack=True, sparse=sparse)
    whole = gpu_options(request, whole, partial(plan_memory, request.sizes, machine))
    plan = plan_memory(request.sizes, machine, whole)
    fitting = largest_context(request.sizes, machine, whole, request.trained_context)
    dense = "all of the model is on the GPU, which computes every neuron: none is sparse"
    gathering = sum(layer.gathers for layer in plan.layers)
    if gathering:
        dense = Detail(f"the GPU reads only the active neurons of {gathering} of {len(plan.layers)} layers")
    warnings = (dense,) if request.sparse_required else ()
    return DevicePlan(plan, fitting, (*warnings, *sequence_notes(request, whole)))


def _on_gpus(request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine]) -> DevicePlan:
    """All on the GPU that is fastest alone, or consecutive layers on each GPU, with the CPU if need be."""
    if is_for_cpu(request.kv):
        raise GpuUnavailableError(
            f"{request.name}: on several GPUs: kv {request.kv} runs on the CPU only; take f16, fp8, q8_0 or "
            "q4_0 (kv=)"
        )
    given = request.vram_of_each or (None,)
    budgets = given if len(given) == len(machine.gpus) else (given[0],) * len(machine.gpus)
    alone = _alone(request, machine, budgets)
    tensor = None if request.split == "layers" else _divided(request, machine, budgets)
    if tensor is not None and request.split == "tensor":
        return tensor
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
    options = replace(_options(request), device="gpu", repack=True, draft=None)
    try:
        plan = plan_pipeline(request.sizes, machine, options, budgets)
    except PlanError:
        return _on_gpus_and_cpu(request, measured(machine), budgets)
    if tensor is not None and _is_faster(tensor.memory, plan):
        return tensor
    return DevicePlan(plan, request.context, _several_notes(request))


def _refused_by_layers(request: PlanRequest) -> str:
    """What of the request consecutive layers on several GPUs don't take; "": they take all."""
    if request.lora is not None:
        return "adapters (lora=)"
    return "draft model (draft=)" if request.draft_required else ""


def _alone(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan | None:
    """The plan of the GPU on which the whole model decodes fastest; None: it fits none."""
    plans: list[DevicePlan] = []
    for gpu, vram in zip(machine.gpus, budgets, strict=True):
        with suppress(PlanError):
            plans.append(_whole_on_gpu(replace(request, vram=vram), replace(machine, gpus=(gpu,))))
    return min(plans, key=lambda each: each.memory.prediction.seconds, default=None)


def _divided(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan | None:
    """The plan of tensor parallel; None: there is none. Raises `GpuUnavailableError` if it was requested."""

    def planned(own: PlanRequest) -> DevicePlan:
        options = replace(_options(own), device="gpu", repack=True)
        options = gpu_options(own, options, plan)
        return DevicePlan(plan(options), own.context, sequence_notes(own, options))

    def plan(options: PlanOptions) -> MemoryPlan:
        return plan_tensor(request.sizes, machine, options, budgets)

    head = request.draft if request.draft is not None and request.draft.is_draft_head else None
    try:
        if head is None:
            return planned(request)
        without = planned(replace(request, draft=None, draft_required=False))
        return without.noted(HEAD_ON_SEVERAL) if request.draft_required else without
    except PlanError as error:
        if request.split == "auto":
            return None
        raise GpuUnavailableError(f"{request.name}: tensor parallel: {error}; take split='layers'") from error


def _is_faster(tensor: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether tensor parallel is predicted to be clearly faster; without measured speeds it isn't."""
    if "unmeasured" in (tensor.machine.origin, other.machine.origin):
        return False
    return tensor.prediction.seconds < MAX_TENSOR_RATIO * other.prediction.seconds


def _on_gpus_and_cpu(request: PlanRequest, machine: Machine, budgets: Sequence[int | None]) -> DevicePlan:
    """As `_on_gpus`, where the first GPU shares its layers with the CPU."""
    options = replace(_split_steps(request), draft=None)
    try:
        plan = plan_pipeline_with_cpu(request.sizes, machine, options, budgets)
    except PlanError as error:
        raise GpuUnavailableError(f"{request.name}: on several GPUs and the CPU: {error}") from error
    return DevicePlan(plan, request.context, _several_notes(request))


def _several_notes(request: PlanRequest) -> tuple[str, ...]:
    """What the user should know about consecutive layers on several GPUs."""
    return () if request.parallel == 1 else (SEVERAL_QUEUE,)


def _split(request: PlanRequest, machine: Machine) -> DevicePlan:
    sparse = request.sparse if request.sparse_required else None
    options = _with_sparse(replace(_split_steps(request), expert_cache=True), sparse)
    options = split_options(request, machine, options)
    try:
        plan = plan_memory(request.sizes, machine, options)
        if request.sparse and not sparse:
            plan = _sparse_if_faster(request, machine, _with_sparse(options, request.sparse), plan)
    except PlanError as error:
        plan = _split_with_disk(request, machine, options, error)
    if plan.head != "gpu":
        raise GpuUnavailableError(f"{request.name}: {plan.limit_reason or 'no part is faster on the GPU'}")
    return DevicePlan(plan, request.context, (*request.warnings, *sequence_notes(request, options)))


def _with_sparse(options: PlanOptions, sparse: SparseOptions | None) -> PlanOptions:
    """The options with sparse layers; there is no expert cache if experts are among them."""
    adapted = options.lora is not None and options.lora.has_experts
    cached = options.expert_cache and not adapted and not (sparse and sparse.has_experts)
    return replace(options, sparse=sparse, expert_cache=cached)


def _sparse_if_faster(
    request: PlanRequest, machine: Machine, options: PlanOptions, dense: MemoryPlan
) -> MemoryPlan:
    """The plan with sparse layers on the CPU, if a token is predicted to take clearly less time; else the
    dense one.
    """
    try:
        plan = plan_memory(request.sizes, machine, options)
    except PlanError:
        return dense
    return plan if plan.ms_per_token < MAX_SPARSE_RATIO * dense.ms_per_token else dense


def _split_with_disk(
    request: PlanRequest, machine: Machine, options: PlanOptions, refusal: PlanError
) -> MemoryPlan:
    """The plan of a model that main memory and the GPU can't hold at any context."""
    fitting = largest_context(request.sizes, machine, options, request.trained_context)
    if fitting or options.draft is not None:
        raise _out_of_memory(request, refusal, fitting) from refusal
    try:
        return plan_memory(request.sizes, machine, replace(options, disk=True, sparse=None))
    except PlanError as error:
        raise GpuUnavailableError(f"{request.name}: {error}") from error


def _on_cpu(request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine]) -> DevicePlan:
    options = replace(_options(request), device="cpu", sparse=request.sparse)
    plan_with = partial(plan_memory, request.sizes, machine)
    options = replace(options, sequences=automatic_sequences(request, options, plan_with))
    fitting = largest_context(request.sizes, machine, options, request.trained_context)
    try:
        plan = plan_memory(request.sizes, machine, options)
    except PlanError as error:
        is_dense = not request.sparse_required or request.bundled is not None
        if fitting or not is_dense or not request.repack:
            raise _out_of_memory(request, error, fitting) from error
        return _on_cpu_with_disk(request, machine, options, measured)
    if request.draft is None or request.draft_required:
        return DevicePlan(plan, fitting)
    try:
        drafting = replace(options, draft=request.draft)
        return DevicePlan(plan_memory(request.sizes, machine, drafting), fitting)
    except PlanError:
        return DevicePlan(plan, fitting, (NO_DRAFT,))


def _on_cpu_with_disk(
    request: PlanRequest, machine: Machine, options: PlanOptions, measured: Callable[[Machine], Machine]
) -> DevicePlan:
    """The fastest CPU plan of a model whose weights main memory can't hold at any context."""
    drafts = [options.draft] if request.draft is None or request.draft_required else [None, request.draft]
    only_sparse, bundled = request.sparse_required, request.bundled
    try:
        plan = plan_from_disk(
            request.sizes, measured(machine), options, drafts, bundled, only_sparse=only_sparse
        )
    except PlanError as error:
        raise _out_of_memory(request, error, 0) from error
    return DevicePlan(plan, 0, (NO_DRAFT,) if request.draft and plan.draft is None else ())


def _out_of_memory(request: PlanRequest, refusal: PlanError, fitting: int) -> OutOfMemoryError:
    """The error with a suggested solution, in one line."""
    if request.parallel > 1:
        remedy = "hold fewer sequences (parallel=)"
    elif 0 < fitting < request.context:
        remedy = f"with a context of {fitting} it fits (context=)"
    elif request.draft_required:
        remedy = "leave the draft model out (draft=None)"
    else:
        remedy = "take a smaller model or fewer bits per weight"
    unused = f"; {request.bundle_error}" if request.bundle_error else ""
    return OutOfMemoryError(f"{request.name}: {refusal}; {remedy}{unused}")
