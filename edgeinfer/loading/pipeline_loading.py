"""Loads consecutive layers of a model on several GPUs. Imports torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgeinfer.loading.gpu_loading import exchange_buffer, kept_layers, load_on_gpu, prepared
from edgeinfer.loading.model_source import LoadProgress, ModelSource, PartSource, planned_specification
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.planned_devices import DevicePlan
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.sizes.cuda_buffers import KEPT_STATES
from edgeinfer_kernels.stages import entered_stages, layer_parts, pipeline_refusal
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.several_gpus.pipeline_plan import PipelinePlan, layer_counts
from edgeinfer_offload.runtime.pipeline_backend import LaterPart, PipelineBackend
from edgeinfer_offload.runtime.split_backend import SplitBackend

if TYPE_CHECKING:
    from edgeinfer.loading.engine_building import EngineBuilder

BuilderOf = Callable[[ModelSource, DevicePlan], "EngineBuilder"]


def load_pipeline(
    source: ModelSource, gpus: tuple[Gpu, ...], plan: PipelinePlan, builder: BuilderOf
) -> tuple[PipelineBackend, list[str]]:
    """The plan's parts on the GPUs, ready for steps, and warnings for the user. `builder`: of a first part
    that is split between its GPU and the CPU.

    Raises:
        GpuUnavailableError: the model has a matrix without a GPU kernel, its layers can't be on several GPUs,
            or the kernels can't be compiled.
        DeviceMemoryError: other programs took memory of a GPU.
    """
    spec = planned_specification(source, plan)
    if refusal := pipeline_refusal(spec):
        raise GpuUnavailableError(f"{source.name}: its layers can't be on several GPUs: {refusal}")
    parts = layer_parts(spec, source.weights, layer_counts(plan))
    sources = [PartSource.of(source, part) for part in parts]
    first, warnings = _first(sources[0], gpus[0], plan.parts[0], builder)
    later: list[LaterPart] = []
    try:
        for part, gpu, planned in zip(sources[1:], gpus[1:], plan.parts[1:], strict=True):
            later.append(_later(part, gpu, planned, len(spec.layers)))
    except BaseException as error:
        for shard in (first, *(each.shard for each in later)):
            shard.close()
        if isinstance(error, UnsupportedOnDeviceError):
            raise GpuUnavailableError(f"{source.name}: {error}") from error
        raise
    return PipelineBackend(first, later), warnings


def _first(
    source: PartSource, gpu: Gpu, plan: MemoryPlan, builder: BuilderOf
) -> tuple[CudaBackend | SplitBackend, list[str]]:
    """The part with the embedding: on its GPU, or shared with the CPU."""
    if len(plan.devices) > 1:
        return builder(source, DevicePlan(plan, source.context)).split_backend()
    return load_on_gpu(source, gpu, plan, LoadProgress(source)), []


def _later(source: PartSource, gpu: Gpu, plan: MemoryPlan, layers: int) -> LaterPart:
    """A part that gets hidden states in its exchange buffer; `layers`: of the whole model. The last one keeps
    states for a draft head.
    """
    entry, before = exchange_buffer(gpu, source.specification), layers - len(source.specification.layers)
    kept = kept_layers(plan)
    shard = GpuShard(
        source.specification,
        source.weights,
        pool_positions(source.context, plan.options.sequences),
        cuda_device(gpu.index),
        DeviceOptions(
            kv=source.options.kv,
            chunk=plan.options.chunk,
            stages=entered_stages(source.specification),
            kept_states=KEPT_STATES if plan.has_gpu_head else 0,
            kept_layers=tuple(layer - before for layer in kept),
        ),
        entry,
        on_loaded=LoadProgress(source),
    )
    shard.begin_at_exchange_buffer()
    return LaterPart(prepared(shard, gpu, source, plan), entry)
