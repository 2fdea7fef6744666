"""Whether a model fits this machine, and its approximate speed, from what is measured already."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from edgeinfer.loading.model_source import DEFAULT_CONTEXT
from edgeinfer.planning.gpu_selection import GpuUnavailableError, usable_gpu
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.layout.packed_matrix import UnsupportedFormatError
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.machine.measure import measured_threads, stored_figures, stored_threads
from edgeinfer_offload.machine.this_machine import (
    are_kernels_built,
    unmeasured_machine,
    with_cpu_speeds,
    with_gpu,
    with_known_cpu_speeds,
)
from edgeinfer_offload.planner.memory_plan import PlanError
from edgeinfer_offload.planner.plan_types import PlacementName, PlanOptions
from edgeinfer_offload.planner.planner import plan_memory

ASSUMED_BYTES_PER_SECOND = 20e9
"""Memory bandwidth of a typical laptop; assumed if this machine isn't measured yet."""
USUAL_FORMATS = ("Q4_K", "Q6_K")
"""The formats of Q4_K_M, the usual quantization of the registry."""


@dataclass(frozen=True)
class Fit:
    """How a model fits this machine. `nbytes`: bytes of main memory and GPU together; None: unknown.

    `tokens_per_second`: decoded ones, None of an encoder. `placement`: where it runs; None: it doesn't.
    `prefill_tokens_per_second`: None where matmuls weren't measured. `is_assumed`: the kernels weren't
    measured for this model's formats.
    """

    fits: bool
    nbytes: int | None
    tokens_per_second: float | None = None
    limit_reason: str = ""
    placement: PlacementName | None = None
    prefill_tokens_per_second: float | None = None
    is_assumed: bool = False


def known_machine() -> Machine:
    """This machine with the memory free now and stored measurements; nothing is measured.

    Its `origin` is "unmeasured" if the memory bandwidth is assumed.
    """
    cache = user_folder("cache")
    threads = usable_cpus()
    known = stored_figures(cache).known()
    measured = [known[key] for count in range(1, threads + 1) if (key := f"{count} threads") in known]
    machine = unmeasured_machine(threads)
    speed = max(measured, default=ASSUMED_BYTES_PER_SECOND)
    machine = replace(
        machine,
        processor=replace(machine.processor, bytes_per_second=speed),
        origin="measured" if measured else "unmeasured",
    )
    try:
        gpu = usable_gpu("auto")
    except GpuUnavailableError:
        return machine
    if gpu is None:
        return machine
    from edgeinfer_kernels.cuda.device_parts import free_bytes

    return with_gpu(machine, gpu, free_bytes(gpu.index), cache)


def measure_usual_formats() -> None:
    """Measure the kernels of the usual formats in seconds, if they are compiled and not measured yet."""
    cache = user_folder("cache")
    if are_kernels_built(cache, USUAL_FORMATS):
        with_cpu_speeds(unmeasured_machine(measured_threads(cache)), cache, USUAL_FORMATS)


def with_known_speeds(machine: Machine, sizes: ModelSizes) -> Machine:
    """This machine with the speeds that `edgeinfer plan` uses for the model, if they are stored; a described
    one as it is. Else other formats count as the usual ones, and without these the memory bandwidth counts;
    the origin is "unmeasured" then, unless there is a GPU.
    """
    if machine.origin == "described":
        return machine
    cache = user_folder("cache")
    formats = sizes.formats
    threads = stored_threads(cache) or machine.processor.threads
    counted = replace(machine, processor=replace(machine.processor, threads=threads))
    measured = with_known_cpu_speeds(counted, cache, formats, sizes.nbytes)
    if measured is not None:
        return measured
    usual = with_known_cpu_speeds(counted, cache, USUAL_FORMATS, 0)
    if usual is not None:
        slowest = min(usual.processor.kernels.values())
        kernels = {**dict.fromkeys(formats, slowest), **usual.processor.kernels}
        machine = replace(usual, processor=replace(usual.processor, kernels=kernels))
    return machine if machine.graphics else replace(machine, origin="unmeasured")


def fit(sizes: ModelSizes, machine: Machine, context: int = DEFAULT_CONTEXT) -> Fit:
    """How a model of these sizes fits a machine with this context, without disk offload."""
    device: Literal["any", "cpu"] = "cpu" if machine.graphics is None else "any"
    try:
        plan = plan_memory(sizes, machine, PlanOptions(context=context, device=device))
    except (PlanError, UnsupportedFormatError) as error:
        return Fit(False, None, limit_reason=str(error))
    gpu = machine.graphics if plan.placement == "gpu" else None
    computes = (gpu or machine.processor).operations_per_second
    decode, prefill = plan.prediction.decode_tokens_per_second, plan.prediction.prefill_tokens_per_second
    prefill = prefill if math.isfinite(computes) else 0.0
    rates = [rate if math.isfinite(rate) and rate > 0 else None for rate in (decode, prefill)]
    is_assumed = machine.origin == "unmeasured"
    return Fit(True, plan.nbytes, rates[0], "", plan.placement, rates[1], is_assumed)
