"""Loads a model on a GPU: memory check, backend and engine. Imports torch."""

from dataclasses import replace

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.model_source import LoadedEngine, LoadProgress, ModelSource
from edgeinfer.planning.device_plan import DevicePlan, plan_devices
from edgeinfer.planning.gpu_choice import GpuUnavailableError
from edgeinfer.planning.plan_request import request_for
from edgeinfer.planning.sparse_choice import SparseChoice
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError, KernelsUnavailableError
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK, EVERY_WIDTH, FEW_WIDTHS
from edgeinfer_offload.machine.this_machine import unmeasured_machine, with_gpu
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import DRAFT, SHARED_ITEMS

TUNING_SECONDS = 9.0
"""Time limit for tuning the tile configs of a step, once per GPU and model shape. On an H200 as good as
twenty seconds (8B in Q4_0, Q4_K_M, Q8_0: 667, 607, 459 tokens/s, with twenty 666, 604, 454)."""
TUNED_FROM_BYTES = 200 << 20
"""Weight bytes per token below which a step is bound by latency, and tuning doesn't help."""


def load_on_gpu(source: ModelSource, gpu: Gpu, planned: DevicePlan) -> LoadedEngine:
    """An engine whose weights, cache and activations are all on the GPU, as planned.

    Raises:
        GpuUnavailableError: the model has a matrix without a GPU kernel, or other programs took the memory.
    """
    plan = planned.memory
    try:
        backend = CudaBackend(
            source.specification,
            source.weights,
            source.context,
            cuda_device(gpu.index),
            DeviceOptions(kv=source.wishes.kv),
            on_placed=LoadProgress(source),
        )
    except UnsupportedOnDeviceError as error:
        raise GpuUnavailableError(f"{source.name}: {error}") from error
    except DeviceMemoryError as error:
        raise GpuUnavailableError(f"{source.name}: {error}; other programs took it since") from error
    made_ready(backend, gpu, source, plan.weight_bytes_per_token)
    engine = NativeEngine(
        source.specification, backend, source.context, CHUNK, plan.weight_bytes_per_token, planned.fitting
    )
    return LoadedEngine(
        engine,
        lambda: plan,
        draft=plan.draft,
        threads=plan.machine.processor.threads,
        gpu=gpu,
        whole_on_gpu=True,
        draft_gpu_bytes=draft_gpu_bytes(plan),
        notes=list(planned.notes),
    )


def load_draft_on_gpu(source: ModelSource, gpu: Gpu, nbytes: int) -> LoadedEngine:
    """Load a draft model in the bytes that the target's plan reserves for it. Raises
    `GpuUnavailableError`.
    """
    request = replace(request_for(source, SparseChoice(), None), device="cuda", vram=None, ram=None)
    machine = with_gpu(unmeasured_machine(1), gpu, nbytes, user_folder("cache"))
    planned = plan_devices(request, machine)
    if planned.kind != "gpu":
        raise GpuUnavailableError(f"{source.name}: the GPU has no room for the draft model")
    return load_on_gpu(source, gpu, planned)


def draft_gpu_bytes(plan: MemoryPlan) -> int:
    """GPU bytes that a plan reserves for the draft model, including those shared by all models."""
    if plan.draft != "gpu":
        return 0
    return sum(
        item.bytes for item in plan.items if item.device == "gpu" and item.item in (DRAFT, *SHARED_ITEMS)
    )


def made_ready(backend: CudaBackend, gpu: Gpu, source: ModelSource, weight_bytes: int) -> CudaBackend:
    """The backend, tuned for this GPU if its step reads enough, with its steps compiled; of all token counts
    if drafts need them.

    Raises:
        GpuUnavailableError: it can't compile, or the GPU failed.
    """
    try:
        if weight_bytes >= TUNED_FROM_BYTES:
            backend.tune(user_folder("cache") / "gpu", TUNING_SECONDS)
        widths = EVERY_WIDTH if source.wishes.drafts_on_gpu else FEW_WIDTHS
        backend.warm_up(widths, source.wishes.build_progress)
    except BaseException as error:
        backend.close()
        if isinstance(error, KernelsUnavailableError | BackendError):
            raise GpuUnavailableError(f"{gpu.name}: {error}") from error
        raise
    return backend
