"""Plans a model on one GPU: all of it there, or split between the GPU and the CPU."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from edgeinfer.errors import Detail, OutOfMemoryError
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.parallel_sequences import gpu_options, sequence_notes, split_options
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.planned_devices import (
    DevicePlan,
    Measured,
    out_of_memory,
    plan_options,
    split_plan_options,
)
from edgeinfer_kernels.caches.cache_types import is_for_cpu
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import largest_context, plan_memory
from edgeinfer_offload.planner.sparse_types import SparseOptions

NO_HEAD = (
    "the GPU has too little memory for the draft head: using prompt lookup instead; device='cpu' or a "
    "smaller context has room for it"
)
NO_STATES = (
    "the GPU has too little memory for the draft head and the attention of all layers, whose hidden states "
    "or caches the head reads: using prompt lookup instead; device='cpu' uses the head"
)
CPU_HEAD = (
    "this draft head (a block drafter with a Markov head or a selector) runs on the CPU only, with all of "
    "its model: using prompt lookup instead; device='cpu' uses the head"
)
MAX_SPARSE_RATIO = 0.9
"""Sparse layers next to a GPU must take at most this much of the time of dense ones, unless requested."""


def plan_on_gpu(request: PlanRequest, machine: Machine, measured: Measured) -> DevicePlan:
    if is_for_cpu(request.kv):
        raise GpuUnavailableError(
            f"kv: {request.kv} runs on the CPU only; take f16, fp8, q8_0 or q4_0 on a GPU (kv=)"
        )
    try:
        return plan_whole_on_gpu(request, machine)
    except PlanError:
        return _split_with_head(request, measured(machine))


def plan_whole_on_gpu(request: PlanRequest, machine: Machine) -> DevicePlan:
    """All of the model on the GPU, with its draft head if both fit. Raises `PlanError`: it doesn't fit."""
    return with_draft_head(
        request, lambda own: _whole_on_gpu(own, machine), request.draft, NO_HEAD, automatic=True
    )


def with_draft_head(
    request: PlanRequest,
    plan: Callable[[PlanRequest], DevicePlan],
    head: ModelSizes | None,
    note: str,
    *,
    automatic: bool = False,
) -> DevicePlan:
    """The `plan` of a request, with a required draft head, of the sizes `head`, on the GPU; if it doesn't fit
    there, or is None, without it and with the `note`. One that isn't required is used if it's `automatic`.
    """
    if request.draft is None or not request.draft.is_draft_head:
        return plan(request)
    without = replace(request, draft=None, draft_required=False)
    if head is not None and request.draft.has_device_kernels and (automatic or request.draft_required):
        with suppress(PlanError, GpuUnavailableError, OutOfMemoryError):
            planned = plan(replace(request, draft=head, draft_required=True))
            if planned.memory.has_gpu_head:
                return planned
    planned = plan(without)
    if not request.draft_required:
        return planned
    return planned.noted(note if request.draft.has_device_kernels else CPU_HEAD)


def _whole_on_gpu(request: PlanRequest, machine: Machine) -> DevicePlan:
    sparse = request.sparse if request.sparse_required else None
    whole = replace(plan_options(request), device="gpu", repack=True, sparse=sparse)
    whole = gpu_options(request, whole, partial(plan_memory, request.sizes, machine))
    plan = plan_memory(request.sizes, machine, whole)
    fitting = largest_context(request.sizes, machine, whole, request.trained_context)
    dense = "all of the model is on the GPU, which computes every neuron: none is sparse"
    gathering = sum(layer.gathers for layer in plan.layers)
    if gathering:
        dense = Detail(f"the GPU reads only the active neurons of {gathering} of {len(plan.layers)} layers")
    warnings = (dense,) if request.sparse_required else ()
    return DevicePlan(plan, fitting, (*warnings, *sequence_notes(request, whole)))


def _split_with_head(request: PlanRequest, machine: Machine) -> DevicePlan:
    """The plan of a model that is split between the GPU and the CPU, with a required head if possible."""
    head, note = request.draft, NO_HEAD
    if head is not None and head.is_draft_head:
        between = head.reads_between(len(request.sizes.layers))
        head, note = head.as_head_of_split(request.sizes), NO_STATES if between else NO_HEAD
    return with_draft_head(request, lambda own: _split(own, machine), head, note)


def _split(request: PlanRequest, machine: Machine) -> DevicePlan:
    sparse = request.sparse if request.sparse_required else None
    options = _with_sparse(replace(split_plan_options(request), expert_cache=True), sparse)
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
        raise out_of_memory(request, refusal, fitting) from refusal
    try:
        return plan_memory(request.sizes, machine, replace(options, disk=True, sparse=None))
    except PlanError as error:
        raise GpuUnavailableError(f"{request.name}: {error}") from error
