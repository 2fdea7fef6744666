"""Loads consecutive layers of a model on several GPUs. Imports torch."""

from edgeinfer.loading.gpu_loading import exchange_buffer, prepared
from edgeinfer.loading.model_source import LoadProgress, ModelSource, planned_specification
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.layer_cache import pool_positions
from edgeinfer_kernels.stages import entered_stages, layer_parts, pipeline_refusal
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.pipeline_plan import layer_counts
from edgeinfer_offload.runtime.pipeline_backend import LaterPart, PipelineBackend


def load_pipeline(
    source: ModelSource, gpus: tuple[Gpu, ...], plan: MemoryPlan, progress: LoadProgress
) -> PipelineBackend:
    """The plan's layers on each GPU, ready for steps.

    Raises:
        GpuUnavailableError: the model has a matrix without a GPU kernel, its layers can't be on several GPUs,
            or the kernels can't be compiled.
        DeviceMemoryError: other programs took memory of a GPU.
    """
    spec = planned_specification(source, plan)
    if refusal := pipeline_refusal(spec):
        raise GpuUnavailableError(f"{source.name}: its layers can't be on several GPUs: {refusal}")
    shards: list[CudaBackend] = []
    entries: list[ExchangeBuffer] = []
    try:
        for gpu, part in zip(gpus, layer_parts(spec, source.weights, layer_counts(plan)), strict=True):
            entry = exchange_buffer(gpu, part[0]) if shards else None
            entries += [entry] if entry is not None else []
            shards.append(_shard(source, gpu, part, plan, entry, progress))
    except UnsupportedOnDeviceError as error:
        _close(shards)
        raise GpuUnavailableError(f"{source.name}: {error}") from error
    except BaseException:
        _close(shards)
        raise
    later = [LaterPart(shard, entry) for shard, entry in zip(shards[1:], entries, strict=True)]
    return PipelineBackend(shards[0], later)


def _shard(
    source: ModelSource,
    gpu: Gpu,
    part: tuple[DecoderSpec, DecoderWeights],
    plan: MemoryPlan,
    entry: ExchangeBuffer | None,
    progress: LoadProgress,
) -> CudaBackend:
    """The part of one GPU. `entry`: where it gets hidden states; None: it has the embedding."""
    spec, weights = part
    shard = CudaBackend(
        spec,
        weights,
        pool_positions(source.context, plan.options.sequences),
        cuda_device(gpu.index),
        DeviceOptions(
            kv=source.options.kv,
            chunk=plan.options.chunk,
            stages=() if entry is None else entered_stages(spec),
        ),
        on_loaded=progress,
        exchange_buffer=entry,
    )
    if entry is not None:
        shard.begin_at_exchange_buffer()
    return prepared(shard, gpu, source, plan)


def _close(shards: list[CudaBackend]) -> None:
    for shard in shards:
        shard.close()
