"""Loading a model on a GPU: what it takes there, whether that fits, and its engine. Imports torch."""

from edgeinfer.kv_cache import KVCache
from edgeinfer.loading.gpu_choice import GpuFullError, GpuUnavailableError
from edgeinfer.loading.model_source import DraftRoom, LoadedEngine, ModelSource, Placing
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.buffer_sizes import CHUNK, EVERY_WIDTH, FEW_WIDTHS
from edgeinfer_kernels.cuda.device_errors import KernelsUnavailableError
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device, free_bytes
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.layer_cache import CPU_CACHES
from edgeinfer_offload.machine import Machine
from edgeinfer_offload.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.plan import largest_context, plan_memory
from edgeinfer_offload.plan_facts import PlanWishes
from edgeinfer_offload.this_machine import unmeasured_machine, with_gpu

TUNING_SECONDS = 9.0
"""What finding the best cuts of a step may take, once for a GPU and the shape of a model: on an H200 as good
as twenty (8B in Q4_0, Q4_K_M, Q8_0: 667, 607, 459 tokens/s, with twenty 666, 604, 454).
"""
TUNED_FROM_BYTES = 200 << 20
"""Weight bytes a token below which a step is latency, and not worth tuning."""


def load_on_gpu(source: ModelSource, gpu: Gpu, kept: int | None = None) -> LoadedEngine:
    """An engine whose weights, cache and activations all lie on the GPU, in so many bytes as were `kept` for
    it, or in what is free.

    Raises:
        GpuFullError: it doesn't fit.
        GpuUnavailableError: the model has a matrix without a kernel there.
    """
    if source.wishes.kv in CPU_CACHES:
        raise GpuUnavailableError(
            f"kv: {source.wishes.kv} runs on the CPU only; take f16, q8_0 or q4_0 on a GPU (--kv, kv=)"
        )
    free = free_bytes(gpu.index) if kept is None else kept
    machine = with_gpu(unmeasured_machine(1), gpu, free, user_folder("cache"))
    wishes = PlanWishes(
        context=source.context,
        kv=source.wishes.kv,
        device="gpu",
        vram=source.wishes.vram,
        ram=source.wishes.ram,
    )
    plan, largest = _planned(source, machine, wishes)
    try:
        backend = CudaBackend(
            source.specification,
            source.weights,
            source.context,
            cuda_device(gpu.index),
            DeviceOptions(kv=wishes.kv),
            on_placed=Placing(source),
        )
    except UnsupportedOnDeviceError as error:
        raise GpuUnavailableError(f"{source.name}: {error}") from error
    except DeviceMemoryError as error:
        raise GpuUnavailableError(f"{source.name}: {error}; other programs took it since") from error
    made_ready(backend, gpu, source, plan.weight_bytes_per_token)
    cache_bytes = sum(item.bytes for item in plan.items if item.item.endswith("keys and values"))
    cache = KVCache(source.context, device_bytes=cache_bytes)
    engine = Transformer(source.specification, backend, cache, CHUNK, plan.weight_bytes_per_token, largest)
    return LoadedEngine(
        engine,
        lambda: plan,
        plan.bytes_on("cpu"),
        on_gpu=True,
        whole_on_gpu=True,
        room=DraftRoom(gpu, None if wishes.vram is None else max(0, wishes.vram - plan.own_gpu_bytes)),
    )


def made_ready(backend: CudaBackend, gpu: Gpu, source: ModelSource, weight_bytes: int) -> CudaBackend:
    """The backend, tuned for this GPU if its step reads enough, and its steps compiled: of every width where
    drafts will ask for them.

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


def _planned(source: ModelSource, machine: Machine, wishes: PlanWishes) -> tuple[MemoryPlan, int]:
    """The plan of everything on the GPU, and the largest context that fits.

    Raises:
        GpuFullError, GpuUnavailableError: as for `load_on_gpu`.
    """
    largest = largest_context(source.sizes, machine, wishes, source.config.trained_context)
    try:
        return plan_memory(source.sizes, machine, wishes), largest
    except PlanError as error:
        if "may be used" not in str(error):
            raise GpuUnavailableError(f"{source.name}: {error}") from error
        fewer = wishes.context > largest > 0
        way_out = (
            f"with a context of {largest} it fits (--context, context=)"
            if fewer
            else "take fewer bits a weight, or --device cpu"
        )
        raise GpuFullError(f"{source.name}: {error}; {way_out}") from error
