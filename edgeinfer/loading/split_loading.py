"""Loading a model that is larger than the GPU: whole layers on either side of a cut. Imports torch."""

from dataclasses import dataclass, replace

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.kv_cache import KVCache
from edgeinfer.loading.gpu_choice import GpuUnavailableError
from edgeinfer.loading.gpu_loading import made_ready
from edgeinfer.loading.model_source import LoadedEngine, ModelSource, Placing
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import CacheType
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.features import choose
from edgeinfer_kernels.cpu.kernel_units import kernel_formats, kernel_units
from edgeinfer_kernels.cpu.objects import Kernels, load_kernels
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device, free_bytes
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_offload.measure import remembered_threads
from edgeinfer_offload.memory_plan import CPU_BATCH, MemoryPlan, PlanError, PlanWishes, Repacking
from edgeinfer_offload.plan import largest_context, plan_memory
from edgeinfer_offload.split_backend import SplitBackend
from edgeinfer_offload.this_machine import unmeasured_machine, with_cpu_speeds, with_gpu

ATTEMPTS = 3
"""Plans that are tried while other programs take memory of the GPU, each with less of it."""
SHARE_LEFT = 0.9


def load_split(source: ModelSource, gpu: Gpu) -> LoadedEngine:
    """An engine with the lower layers on the CPU, the others and the head on the GPU.

    Raises:
        GpuUnavailableError: not one layer fits the GPU, or it has no kernels for them.
        OutOfMemoryError: main memory is too small for the rest.
    """
    wishes, cache_folder = source.wishes, user_folder("cache")
    kernels = load_kernels(
        cache_folder,
        choose(wishes.instruction_set),
        kernel_units(source.weights, head=False),
        wishes.build_progress,
    )
    threads = wishes.threads or remembered_threads(cache_folder, kernels)
    budget, notes = wishes.vram, []
    for attempt in range(ATTEMPTS):
        plan = _planned(source, gpu, threads, budget)
        try:
            loaded = _Sides(source, gpu, plan, kernels, threads).load()
        except DeviceMemoryError as error:
            if attempt == ATTEMPTS - 1:
                raise GpuUnavailableError(f"{source.name}: {error}") from error
            budget = int(SHARE_LEFT * plan.vram_bytes)
            notes = ["other programs took memory of the GPU meanwhile: fewer layers are there"]
            continue
        loaded.notes[:0] = notes
        return loaded
    raise AssertionError("unreachable")


def _planned(source: ModelSource, gpu: Gpu, threads: int, vram: int | None) -> MemoryPlan:
    """The fastest cut within the budgets, at the speeds of this machine."""
    wishes, cache_folder = source.wishes, user_folder("cache")
    machine = with_cpu_speeds(unmeasured_machine(threads), cache_folder, kernel_formats(source.weights))
    machine = with_gpu(machine, gpu, free_bytes(gpu.index), cache_folder)
    asked = PlanWishes(
        context=source.context, kv=wishes.kv, device="layers", vram=vram, ram=wishes.ram, repack=wishes.repack
    )
    try:
        plan = plan_memory(source.sizes, machine, asked)
    except PlanError as error:
        largest = largest_context(
            source.sizes, machine, replace(asked, device="cpu"), source.config.trained_context
        )
        way_out = f"; with a context of {largest} it fits (--context, context=)" if largest else ""
        raise OutOfMemoryError(f"{source.name}: {error}{way_out}") from error
    if plan.cut is None or plan.head != "gpu":
        raise GpuUnavailableError(f"{source.name}: {plan.why_not or 'no layer is faster on the GPU'}")
    return plan


@dataclass(frozen=True)
class _Sides:
    """Both sides of a model that is cut as the plan says."""

    source: ModelSource
    gpu: Gpu
    plan: MemoryPlan
    kernels: Kernels
    threads: int

    def load(self) -> LoadedEngine:
        """Bring everything into place. Raises `DeviceMemoryError`."""
        source, plan, cut = self.source, self.plan, self.plan.cut
        assert cut is not None
        placing = Placing(source)
        above = self._above(cut, placing)
        try:
            kind: CacheType = "f32" if source.wishes.kv == "f32" else "f16"
            lower = source.specification.of_layers(0, cut)
            cache = KVCache.allocate(lower, source.context, kind)
            below = CpuBackend(
                lower,
                source.weights.below(cut),
                cache.layers,
                self.kernels,
                batch=CPU_BATCH,
                threads=self.threads,
                repack=source.wishes.repack,
                head=False,
                on_placed=placing,
            )
        except BaseException:
            above.close()
            raise
        repacking = Repacking(below.repacked_bytes, below.repack_seconds, placing.released)
        cached = KVCache(source.context, cache.layers, self._device_cache_bytes())
        engine = Transformer(
            source.specification,
            SplitBackend(below, above),
            cached,
            min(CPU_BATCH, above.batch),
            plan.weight_bytes_per_token,
            source.context,
        )
        count = len(plan.layers)
        note = f"{count - cut} of {count} layers and the head are on the GPU, the others on the CPU"
        found = replace(plan, repacking=repacking)
        return LoadedEngine(engine, lambda: found, plan.bytes_on("cpu"), on_gpu=True, notes=[note])

    def _above(self, cut: int, placing: Placing) -> CudaBackend:
        source, facts = self.source, self.source.specification
        backend = CudaBackend(
            facts.of_layers(cut, len(facts.layers)),
            source.weights.above(cut),
            source.context,
            cuda_device(self.gpu.index),
            DeviceOptions(quantised_cache=source.wishes.kv == "q8_0", embeds=False),
            on_placed=placing,
        )
        return made_ready(backend, self.gpu, self.plan.weight_bytes_per_token)

    def _device_cache_bytes(self) -> int:
        return sum(
            item.bytes
            for item in self.plan.items
            if item.device == "gpu" and item.item.endswith("keys and values")
        )
