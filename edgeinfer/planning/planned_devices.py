"""The result of planning, and the planner's options, for every kind of device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions, split_batch
from edgeinfer_offload.planner.planner import plan_memory

Measured = Callable[[Machine], Machine]
"""Adds the speeds that a split needs to a machine."""


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


def plan_options(request: PlanRequest) -> PlanOptions:
    """The planner's options of a request."""
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


def split_plan_options(request: PlanRequest) -> PlanOptions:
    """The options for a model that is split between GPU and CPU: both have the tokens of a step."""
    tokens = split_batch(request.kv)
    return replace(plan_options(request), batch=tokens, chunk=tokens)


def out_of_memory(request: PlanRequest, refusal: PlanError, fitting: int) -> OutOfMemoryError:
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
