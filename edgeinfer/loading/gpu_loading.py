"""Loading a model on a GPU: what it takes there, whether that fits, and its engine. Imports torch."""

from bisect import bisect_right
from functools import cached_property

from edgeinfer.kv_cache import KVCache
from edgeinfer.loading.gpu_choice import GpuUnavailableError
from edgeinfer.loading.model_source import LoadedEngine, ModelSource, Placing
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.backend import CudaBackend, KernelsUnavailableError
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError
from edgeinfer_kernels.cuda.device_parts import CHUNK, DeviceOptions, count_parts, cuda_device, free_bytes
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.plane_formats import UnsupportedOnDeviceError
from edgeinfer_offload.plan import Device, Item, MemoryPlan, PlanError, plan_memory

TUNING_SECONDS = 20.0
"""What finding the best cuts of a step may take, once for a GPU and the shape of a model."""
TUNED_FROM_BYTES = 200 << 20
"""Weight bytes a token below which a step is latency, and not worth tuning."""
LIBRARY_BYTES = 320 << 20
"""What packing takes while loading, and torch's libraries and compiled kernels after it; measured."""


def load_on_gpu(source: ModelSource, gpu: Gpu) -> LoadedEngine:
    """An engine whose weights, cache and activations all lie on the GPU.

    Raises:
        GpuUnavailableError: the model has a matrix without a kernel there, or doesn't fit.
    """
    if source.wishes.kv == "f32":
        raise GpuUnavailableError("kv: f32 runs on the CPU only; take f16 or q8_0 on a GPU (--kv, kv=)")
    needs = _Needs(source, gpu)
    free = free_bytes(gpu.index)
    plan = needs.plan(free if source.wishes.vram is None else min(free, source.wishes.vram))
    try:
        backend = CudaBackend(
            source.specification,
            source.weights,
            source.context,
            cuda_device(gpu.index),
            needs.options,
            on_placed=Placing(source),
        )
    except DeviceMemoryError as error:
        raise GpuUnavailableError(f"{source.name}: {error}; other programs took it since") from error
    try:
        if needs.bytes_per_token >= TUNED_FROM_BYTES:
            backend.tune(user_folder("cache") / "gpu", TUNING_SECONDS)
        backend.warm_up()
    except (KernelsUnavailableError, BackendError) as error:
        backend.close()
        raise GpuUnavailableError(f"{gpu.name}: {error}") from error
    cache = KVCache(source.context, device_bytes=needs.cache_bytes(source.context))
    engine = Transformer(
        source.specification, backend, cache, CHUNK, needs.bytes_per_token, needs.largest(plan.device)
    )
    return LoadedEngine(engine, lambda: plan)


class _Needs:
    """What a model takes on the GPU with these wishes."""

    def __init__(self, source: ModelSource, gpu: Gpu) -> None:
        self._source = source
        self._gpu = gpu
        self.options = DeviceOptions(quantised_cache=source.wishes.kv == "q8_0")

    def _items(self, context: int) -> list[Item]:
        source = self._source
        try:
            parts = count_parts(
                source.specification,
                source.weights,
                context,
                cuda_device(self._gpu.index),
                self.options,
            )
        except UnsupportedOnDeviceError as error:
            raise GpuUnavailableError(f"{source.name}: {error}") from error
        items = [Item(part.name, part.nbytes, part.nbytes if part.read else 0) for part in parts]
        return [*items, Item("loading, then libraries", LIBRARY_BYTES, 0)]

    @cached_property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads."""
        items = self._items(1)
        return sum(item.bytes_per_token for item in items if "keys" not in item.name)

    def cache_bytes(self, context: int) -> int:
        return sum(item.nbytes for item in self._items(context) if "keys" in item.name)

    def largest(self, device: Device) -> int:
        """The largest context that fits what was free."""

        def nbytes(context: int) -> int:
            return sum(item.nbytes for item in self._items(context))

        trained = self._source.config.trained_context
        return bisect_right(range(1, trained + 1), device.free_bytes, key=nbytes)

    def plan(self, budget: int) -> MemoryPlan:
        """Everything on the GPU, in `budget` bytes."""
        device = Device(f"cuda:{self._gpu.index}", budget)
        try:
            return plan_memory(self._items(self._source.context), device)
        except PlanError as error:
            largest = self.largest(device)
            way_out = (
                f"with a context of {largest} it fits (--context, context=)"
                if largest
                else "take fewer bits a weight, or --device cpu"
            )
            raise GpuUnavailableError(f"{self._source.name}: {error}; {way_out}") from error
