"""Loads a part of every layer on each GPU, in a process for each. Imports torch."""

from pathlib import Path

from edgeinfer.loading.gpu_loading import TUNED_FROM_BYTES, TUNING_SECONDS, kept_layers
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.loading.tensor.job import HeadJob, TensorJob
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.device_parts import cuda_device
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.sizes.cuda_buffers import KEPT_STATES
from edgeinfer_kernels.tensor_parts import Sums
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_offload.runtime.rank_processes import RankError, RankProcesses
from edgeinfer_offload.runtime.tensor_backend import TensorBackend
from edgeinfer_offload.runtime.tensor_head import TensorHead

RANK_MODULE = "edgeinfer.loading.tensor.rank"
SUMS: Sums = "auto"
"""A benchmark compares the others."""


def load_tensor_parallel(source: ModelSource, gpus: tuple[Gpu, ...], plan: TensorPlan) -> TensorBackend:
    """The plan's ranks, each with its part on its GPU, ready for steps.

    Raises `GpuUnavailableError`: a process ended, a GPU has too little memory, or the model has a matrix
    without a GPU kernel.
    """

    def jobs(store: str) -> list[TensorJob]:
        return [
            TensorJob(
                path=source.file.path,
                name=source.name,
                context=source.context,
                rank=rank,
                shares=plan.shares,
                device=str(cuda_device(gpu.index)),
                store=store,
                sequences=plan.options.sequences,
                kv=source.options.kv,
                chunk=plan.options.chunk,
                whole_caches=plan.options.whole_caches,
                sums=SUMS,
                drafts=source.options.drafts_on_gpu(has_head=part.has_gpu_head),
                tuned_seconds=TUNING_SECONDS if part.weight_bytes_per_token >= TUNED_FROM_BYTES else 0.0,
                kept_states=KEPT_STATES if part.has_gpu_head else 0,
                kept_layers=kept_layers(part),
            )
            for rank, (gpu, part) in enumerate(zip(gpus, plan.parts, strict=True))
        ]

    names = [f"{gpu.name} (cuda:{gpu.index})" for gpu in gpus]
    try:
        processes = RankProcesses(RANK_MODULE, jobs, names, source.options.progress)
    except (RankError, BackendError) as error:
        raise GpuUnavailableError(f"{source.name}: {error}") from error
    return TensorBackend(processes, plan.options.chunk, source.weights.matrices())


def load_tensor_head(path: Path | None, target: LoadedEngine) -> TensorHead:
    """The draft head in a file, None: in that of the model, in the process of the rank that the plan has for
    it.

    Raises:
        GpuUnavailableError: the head has a matrix without a GPU kernel, its kernels can't be compiled, or
            other programs took memory of the GPU.
    """
    backend, plan = target.engine.backend, target.placed
    assert isinstance(backend, TensorBackend)
    assert isinstance(plan, TensorPlan)
    try:
        return TensorHead(backend, plan.draft_rank, HeadJob(plan.draft_rank, path))
    except BackendError as error:
        raise GpuUnavailableError(str(error)) from error
