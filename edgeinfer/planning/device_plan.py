"""The device plan, used by `load` and `edgeinfer plan`: which devices run a model, and where its
bytes are.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from edgeinfer.errors import Detail, OutOfMemoryError
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer_kernels.caches.cache_types import CacheType, is_for_cpu
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.lora.sizes import LoraSizes
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.disk_plan import plan_from_disk
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import CPU_BATCH, BundledOptions, PlanOptions, SparseOptions
from edgeinfer_offload.planner.planner import largest_context, plan_memory
from edgeinfer_offload.planner.several_gpus.pipeline_plan import plan_pipeline, plan_pipeline_with_cpu
from edgeinfer_offload.planner.several_gpus.tensor_plan import plan_tensor

GIB = 1 << 30
NO_DRAFT = Detail("not enough memory for the draft model; using prompt lookup instead")

NO_HEAD = (
    "a draft head next to a GPU needs one that holds it and all of the model: using prompt lookup instead; "
    "device='cpu' or a smaller context has room for it"
)
NO_CPU_HEAD = (
    "this draft head (EAGLE-3, Medusa, or several) runs on the CPU only, with all of its model: using prompt "
    "lookup instead; device='cpu' uses the head"
)
STATE_QUEUE = Detail(
    "requests run one at a time: the GPU would have to hold the recurrent states and caches of all of them; "
    "parallel=N takes N if they fit"
)
SPLIT_QUEUE = Detail(
    "requests run one at a time: the caches of several don't fit, or would slow a single one down by more "
    "than a tenth; parallel=N takes N if they fit"
)
SEVERAL_QUEUE = Detail("requests run one at a time: a model on several GPUs has no batches")
MAX_TENSOR_RATIO = 0.9
"""Tensor parallel must take at most this much of the time of one GPU or of layers, unless requested."""
WHOLE_CACHES = Detail("requests run together: layers with windows cache the whole context of each")
MIN_RATE_SHARE = 0.9
"""Minimum share of the speed of one request that the caches of several automatic ones must leave to it."""
MAX_SPARSE_RATIO = 0.9
"""Sparse layers next to a GPU must take at most this much of the time of dense ones, unless requested."""
AUTOMATIC_SEQUENCES = (4, 2)
"""Numbers of sequences that `parallel` 0 tries."""


@dataclass(frozen=True)
class PlanRequest:
    """A model and its load options. `device`: "cpu", "auto" or "cuda"; the machine has the available devices.

    `draft`: the sizes of its draft model. Unless `draft_required`, it is omitted if it doesn't fit or if the
    model runs on a GPU. `sparse`: for layers on the CPU; `sparse_required`: requested explicitly, so it can't
    be dropped. `parallel`: sequences whose states are held at once; 0: automatic.
    """

    name: str
    sizes: ModelSizes
    context: int
    trained_context: int
    device: str = "auto"
    split: Literal["auto", "tensor", "layers"] = "auto"
    """What each of several GPUs gets."""
    vram: int | None = None
    vram_of_each: tuple[int | None, ...] = ()
    """The budget of each GPU, if the machine has several; one of fewer is that of all."""
    ram: int | None = None
    kv: CacheType = "f16"
    repack: bool = True
    streamed: bool = False
    """Whether blocks on disk can be read ahead of a step."""
    sparse: SparseOptions | None = None
    sparse_required: bool = False
    bundled: BundledOptions | None = None
    """The sparse layers whose neurons are in a bundle file, for a model that main memory can't hold."""
    bundle_error: str = ""
    """Why its bundle file can't be used."""
    routing: tuple[tuple[float, ...], ...] | None = None
    parallel: int = 1
    draft: ModelSizes | None = None
    draft_required: bool = False
    lora: LoraSizes | None = None
    warnings: tuple[str, ...] = ()
    """Warnings for the user of a model that is split."""
    batch: int = CPU_BATCH
    """Maximum tokens of a step on the CPU."""
    chunk: int = CHUNK
    """Maximum tokens of a step on a GPU."""

    @property
    def required_draft(self) -> ModelSizes | None:
        """The draft model, if it can't be omitted."""
        return self.draft if self.draft_required else None


@dataclass(frozen=True)
class DevicePlan:
    """The result; its `memory.stages` name the devices.

    `fitting`: the largest context with which the model fits. `warnings`: for the user, one line each.
    """

    memory: MemoryPlan
    fitting: int
    warnings: tuple[str, ...] = ()

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


def _with_gpu(request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine]) -> DevicePlan:
    if is_for_cpu(request.kv):
        raise GpuUnavailableError(
            f"kv: {request.kv} runs on the CPU only; take f16, fp8, q8_0 or q4_0 on a GPU (kv=)"
        )
    if request.draft is not None and request.draft.is_draft_head:
        return _with_gpu_and_head(request, machine, measured)
    try:
        return _whole_on_gpu(request, machine)
    except PlanError:
        return _split(request, measured(machine))


def _with_gpu_and_head(
    request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine]
) -> DevicePlan:
    """The plan with a requested draft head, if all of the model and the head fit the GPU; else without."""
    if request.draft_required:
        with suppress(PlanError):
            planned = _whole_on_gpu(request, machine)
            if planned.memory.has_gpu_head:
                return planned
    without = _with_gpu(replace(request, draft=None, draft_required=False), machine, measured)
    note = NO_HEAD if request.draft is None or request.draft.has_device_kernels else NO_CPU_HEAD
    notes = (note,) if request.draft_required else ()
    return replace(without, warnings=(*notes, *without.warnings))


def _whole_on_gpu(request: PlanRequest, machine: Machine) -> DevicePlan:
    """All of the model on the GPU. Raises `PlanError`: it doesn't fit."""
    sparse = request.sparse if request.sparse_required else None
    whole = replace(_options(request), device="gpu", repack=True, sparse=sparse)
    whole = _gpu_options(request, machine, whole)
    plan = plan_memory(request.sizes, machine, whole)
    fitting = largest_context(request.sizes, machine, whole, request.trained_context)
    dense = "all of the model is on the GPU, which computes every neuron: none is sparse"
    gathering = sum(layer.gathers for layer in plan.layers)
    if gathering:
        dense = Detail(f"the GPU reads only the active neurons of {gathering} of {len(plan.layers)} layers")
    warnings = (dense,) if request.sparse_required else ()
    return DevicePlan(plan, fitting, (*warnings, *_notes(request, whole)))


def _on_gpus(request: PlanRequest, machine: Machine, measured: Callable[[Machine], Machine]) -> DevicePlan:
    """All on the GPU that is fastest alone, or consecutive layers on each GPU, with the CPU if need be."""
    _refuse_several(request)
    options = replace(_options(request), device="gpu", repack=True, draft=None)
    given = request.vram_of_each or (None,)
    budgets = given if len(given) == len(machine.gpus) else (given[0],) * len(machine.gpus)
    alone: list[MemoryPlan] = []
    for gpu, vram in zip(machine.gpus, budgets, strict=True):
        with suppress(PlanError):
            here = replace(machine, gpus=(gpu,))
            alone.append(plan_memory(request.sizes, here, replace(options, vram=vram)))
    tensor = None if request.split == "layers" else _divided(request, machine, options, budgets)
    if tensor is not None and request.split == "tensor":
        return DevicePlan(tensor, request.context, _several_notes(request))
    if alone:
        plan = min(alone, key=lambda each: each.prediction.seconds)
        if tensor is not None and _is_faster(tensor, plan):
            return DevicePlan(tensor, request.context, _several_notes(request))
        gpu = plan.machine.gpus[0]
        note = (
            f"all of the model is on cuda:{gpu.index}: tokens pass GPUs one after another, so one is faster"
        )
        return DevicePlan(plan, request.context, (Detail(note),))
    try:
        plan = plan_pipeline(request.sizes, machine, options, budgets)
    except PlanError:
        return _on_gpus_and_cpu(request, measured(machine), budgets)
    if tensor is not None and _is_faster(tensor, plan):
        plan = tensor
    return DevicePlan(plan, request.context, _several_notes(request))


def _divided(
    request: PlanRequest, machine: Machine, options: PlanOptions, budgets: Sequence[int | None]
) -> MemoryPlan | None:
    """The plan of tensor parallel; None: there is none. Raises `GpuUnavailableError` if it was requested."""
    try:
        return plan_tensor(request.sizes, machine, options, budgets)
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
    options = replace(_options(request), batch=CHUNK, draft=None)
    try:
        plan = plan_pipeline_with_cpu(request.sizes, machine, options, budgets)
    except PlanError as error:
        raise GpuUnavailableError(f"{request.name}: on several GPUs and the CPU: {error}") from error
    return DevicePlan(plan, request.context, _several_notes(request))


def _refuse_several(request: PlanRequest) -> None:
    """Raise `GpuUnavailableError` for what can't be on several GPUs."""
    refusal = ""
    if is_for_cpu(request.kv):
        refusal = f"kv {request.kv} runs on the CPU only; take f16, fp8, q8_0 or q4_0 (kv=)"
    elif request.lora is not None:
        refusal = "adapters need one GPU that holds the model (lora=)"
    elif request.draft_required:
        refusal = "a draft model needs one GPU that holds the model, or draft='lookup'"
    if refusal:
        raise GpuUnavailableError(f"{request.name}: on several GPUs: {refusal}")


def _several_notes(request: PlanRequest) -> tuple[str, ...]:
    """What the user should know about a model on several GPUs."""
    return () if request.parallel == 1 else (SEVERAL_QUEUE,)


def _split(request: PlanRequest, machine: Machine) -> DevicePlan:
    sparse = request.sparse if request.sparse_required else None
    options = _with_sparse(replace(_options(request), batch=CHUNK, expert_cache=True), sparse)
    options = _split_options(request, machine, options)
    try:
        plan = plan_memory(request.sizes, machine, options)
        if request.sparse and not sparse:
            plan = _sparse_if_faster(request, machine, _with_sparse(options, request.sparse), plan)
    except PlanError as error:
        plan = _split_with_disk(request, machine, options, error)
    if plan.head != "gpu":
        raise GpuUnavailableError(f"{request.name}: {plan.limit_reason or 'no part is faster on the GPU'}")
    return DevicePlan(plan, request.context, (*request.warnings, *_notes(request, options)))


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
    options = replace(options, sequences=_sequences(request, machine, options))
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


def _sequences(request: PlanRequest, machine: Machine, options: PlanOptions) -> int:
    """The number of sequences: as requested, or the largest usual one that fits."""
    if request.parallel:
        return request.parallel
    for count in AUTOMATIC_SEQUENCES:
        try:
            plan_memory(request.sizes, machine, replace(options, sequences=count))
        except PlanError:
            continue
        return count
    return 1


def _gpu_options(request: PlanRequest, machine: Machine, options: PlanOptions) -> PlanOptions:
    """The options with the number of sequences on a GPU: one, if they can't share the caches there, or if
    caches that can be shared don't fit.
    """
    shared = _shared_caches(request, options)
    if request.parallel == 1 or shared is None:
        return options
    if not shared.whole_caches:
        return replace(shared, sequences=_sequences(request, machine, shared))
    for count in _counts(request):
        try:
            plan_memory(request.sizes, machine, replace(shared, sequences=count))
        except PlanError:
            continue
        return replace(shared, sequences=count)
    return options


def _split_options(request: PlanRequest, machine: Machine, options: PlanOptions) -> PlanOptions:
    """As `_gpu_options`, of a split model: automatic sequences leave enough of the model on the GPU. Several
    recurrent states are there only.
    """
    shared = _shared_caches(request, options)
    if request.parallel == 1 or shared is None:
        return options
    if request.parallel and not shared.whole_caches and not request.sizes.is_recurrent:
        return replace(shared, sequences=request.parallel)
    least = 0.0 if request.parallel else MIN_RATE_SHARE * _split_rate(request, machine, options)
    for count in _counts(request):
        found = replace(shared, sequences=count)
        if (rate := _split_rate(request, machine, found)) and rate >= least:
            return found
    return options


def _counts(request: PlanRequest) -> tuple[int, ...]:
    """The numbers of sequences to try."""
    return (request.parallel,) if request.parallel else AUTOMATIC_SEQUENCES


def _split_rate(request: PlanRequest, machine: Machine, options: PlanOptions) -> float:
    """Tokens/s of one request; 0: there is no such split."""
    try:
        plan = plan_memory(request.sizes, machine, options)
    except PlanError:
        return 0.0
    if (
        options.sequences > 1
        and request.sizes.is_recurrent
        and not all(layer.attention == "gpu" for layer in plan.layers)
    ):
        return 0.0  # the states of several sequences are on the GPU
    return plan.prediction.decode_tokens_per_second if plan.head == "gpu" else 0.0


def _shared_caches(request: PlanRequest, options: PlanOptions) -> PlanOptions | None:
    """The options with caches that sequences on a GPU can share, if need be without rings; None: there are
    none.
    """
    positions = pool_positions(request.context, request.parallel or AUTOMATIC_SEQUENCES[0])
    if all(block.has_device_pages(positions) for block in request.sizes.blocks):
        return options
    whole = request.sizes.with_whole_caches()
    if all(block.has_device_pages(positions) for block in whole.blocks):
        return replace(options, whole_caches=True)
    return None


def _notes(request: PlanRequest, options: PlanOptions) -> tuple[str, ...]:
    """What the user should know about several requests on a GPU."""
    if request.parallel == 1:
        return ()
    if options.whole_caches:
        return (WHOLE_CACHES,)
    if options.sequences > 1:
        return ()
    shared = None if request.sizes.is_recurrent else _shared_caches(request, options)
    return (STATE_QUEUE if shared is None else SPLIT_QUEUE,)


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
