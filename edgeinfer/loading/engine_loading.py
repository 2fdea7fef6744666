"""Plans a model once and loads it: on the requested device, or on the GPU that the plan can use."""

from dataclasses import dataclass, field, replace
from functools import partial

from edgeinfer.errors import OutOfMemoryError, SettingError
from edgeinfer.loading.engine_building import EngineBuilder
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.planning.device_plan import plan_devices
from edgeinfer.planning.gpu_selection import GpuUnavailableError, usable_gpus
from edgeinfer.planning.model_request import request_for
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.planned_devices import DevicePlan
from edgeinfer.planning.sparse_selection import SparseSelection, select_sparse_layers
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_formats
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine, PeerSums
from edgeinfer_offload.machine.measure import measured_threads
from edgeinfer_offload.machine.peer_sums import measured_sums
from edgeinfer_offload.machine.this_machine import (
    measure_gpu,
    unmeasured_machine,
    with_cpu_speeds,
    with_disk_speed,
    with_gpu,
    with_gpus,
)
from edgeinfer_offload.planner.plan_types import DRAFT, SHARED_ITEMS
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_offload.runtime.rank_processes import RankError

MAX_ATTEMPTS = 3
"""Number of plans tried while other programs take GPU memory, each with less of it."""
SHARE_LEFT = 0.9


def load_engine(source: ModelSource, draft: ModelSizes | None) -> LoadedEngine:
    """An engine on the requested device; "auto" uses a GPU if possible, or returns the reason why not.

    `draft`: the sizes of its draft model.

    Raises:
        GpuUnavailableError: "cuda" was requested, and no part can run there.
        OutOfMemoryError: it doesn't fit; the text names a context that would.
        SettingError: several memory budgets, or a kind of split, without the names of the GPUs.
    """
    device, warnings = source.options.device, []
    try:
        gpus = () if device == "cpu" else usable_gpus(device)
    except GpuUnavailableError as error:
        if device != "auto":
            raise
        gpus = ()
        warnings.append(f"running on the CPU: {error}")
    _check_several(source, len(gpus))
    sparse = select_sparse_layers(source)
    loading = _Loading(source, sparse, request_for(source, sparse, draft))
    choices = [gpus, gpus[:1]] if len(gpus) > 1 else [gpus] if gpus else []
    for chosen in choices:
        try:
            loaded = loading.on_gpus(chosen) if len(chosen) > 1 else loading.on_gpu(chosen[0])
        except GpuUnavailableError as error:
            if device != "auto":
                raise
            warnings.append(f"running on {'one GPU' if len(chosen) > 1 else 'the CPU'}: {error}")
        else:
            break
    else:
        loaded = loading.on_cpu()
    loaded.warnings.extend(warnings)
    return loaded


def _check_several(source: ModelSource, gpus: int) -> None:
    """Raise `SettingError` for settings of several GPUs without them."""
    device, vram, split = source.options.device, source.options.vram, source.options.split
    if isinstance(vram, tuple) and len(vram) != gpus:
        raise SettingError(f"vram: saw {len(vram)} sizes for device {device!r}; name the GPUs too (device=)")
    if split != "auto" and gpus < 2:
        raise SettingError(
            f"split: saw {split!r} for device {device!r}; name several GPUs, as device='cuda:0,cuda:1'"
        )


@dataclass
class _Loading:
    """Plans and loads one model."""

    source: ModelSource
    sparse: SparseSelection
    request: PlanRequest
    warnings: list[str] = field(default_factory=list)

    def on_cpu(self) -> LoadedEngine:
        """All on the CPU."""
        machine = unmeasured_machine(self._threads())
        planned = plan_devices(replace(self.request, device="cpu"), machine, self._with_disk_speed)
        return EngineBuilder(self.source, planned, sparse=self.sparse).build()

    def on_gpu(self, gpu: Gpu) -> LoadedEngine:
        """All on the GPU, or split as planned; with less GPU memory if other programs take some."""
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

        request = replace(self.request, device="cuda")
        for attempt in range(MAX_ATTEMPTS):
            planned = plan_devices(request, self._unmeasured(gpu), partial(self._measured, gpu=gpu))
            try:
                loaded = EngineBuilder(self.source, planned, gpu, self.sparse).build()
            except DeviceMemoryError as error:
                if attempt == MAX_ATTEMPTS - 1:
                    raise GpuUnavailableError(f"{self.source.name}: {error}") from error
                request = replace(request, vram=int(SHARE_LEFT * planned.memory.vram_bytes))
                self.warnings.append("other programs took memory of the GPU: less of the model is there")
                continue
            loaded.warnings[:0] = self.warnings
            return loaded
        raise AssertionError("unreachable")

    def on_gpus(self, gpus: tuple[Gpu, ...]) -> LoadedEngine:
        """On the GPU that is fastest alone, a part of every layer on each, or consecutive layers on each."""
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError
        from edgeinfer_kernels.cuda.device_parts import free_bytes

        cache = user_folder("cache")
        for gpu in gpus:
            measure_gpu(gpu, cache, sorted(self.source.sizes.formats))
        free = {gpu: free_bytes(gpu.index) for gpu in gpus}
        machine = with_gpus(unmeasured_machine(self._threads()), free, cache, self._sums_of(gpus))
        request = self.request
        planned = plan_devices(request, machine, self._with_cpu_speeds)
        used = [graphics.index for graphics in planned.memory.machine.gpus]
        if len(used) == 1 and "cpu" not in {device.kind for device in planned.memory.devices}:
            return self._on_one_of(gpus, used[0], planned)
        try:
            loaded = self._built(planned, gpus)
        except DeviceMemoryError as error:
            raise GpuUnavailableError(f"{self.source.name}: {error}") from error
        except GpuUnavailableError as error:
            if request.split != "auto" or not isinstance(planned.memory, TensorPlan):
                raise
            self.warnings.append(f"no tensor parallel: {error}")
            by_layers = replace(request, split="layers")
            loaded = self._built(plan_devices(by_layers, machine, self._with_cpu_speeds), gpus)
        loaded.warnings[:0] = self.warnings
        return loaded

    def _on_one_of(self, gpus: tuple[Gpu, ...], index: int, planned: DevicePlan) -> LoadedEngine:
        """On the GPU that a plan for several has selected, as if it were the only one."""
        at = [gpu.index for gpu in gpus].index(index)
        budgets = self.request.vram_of_each
        own = budgets[at] if len(budgets) == len(gpus) else self.request.vram
        self.request = replace(self.request, vram=own, vram_of_each=())
        loaded = self.on_gpu(gpus[at])
        loaded.warnings[:0] = [line for line in planned.warnings if line not in loaded.warnings]
        return loaded

    def _built(self, planned: DevicePlan, gpus: tuple[Gpu, ...]) -> LoadedEngine:
        """The engine of a plan for some of the GPUs."""
        used = {graphics.index for graphics in planned.memory.machine.gpus}
        own = tuple(gpu for gpu in gpus if gpu.index in used)
        return EngineBuilder(self.source, planned, own[0], self.sparse, gpus=own).build()

    def _sums_of(self, gpus: tuple[Gpu, ...]) -> PeerSums | None:
        """How the GPUs add up partial sums, measured on first use. Raises `GpuUnavailableError` if tensor
        parallel was requested and they can't.
        """
        if self.request.split == "layers":
            return None
        try:
            return measured_sums(gpus, user_folder("cache"))
        except (BackendError, RankError) as error:
            if self.request.split == "tensor":
                raise GpuUnavailableError(f"{self.source.name}: tensor parallel: {error}") from error
            self.warnings.append(f"no tensor parallel: {error}")
            return None

    def _unmeasured(self, gpu: Gpu) -> Machine:
        """Memory sizes only, which suffices to decide whether all fits the GPU."""
        from edgeinfer_kernels.cuda.device_parts import free_bytes

        machine = unmeasured_machine(1 if self.request.draft is None else self._threads())
        return with_gpu(machine, gpu, free_bytes(gpu.index), user_folder("cache"))

    def _measured(self, machine: Machine, gpu: Gpu) -> Machine:
        """The machine with the speeds of CPU, GPU and link, measured on first use."""
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

        cache, sizes, graphics = user_folder("cache"), self.source.sizes, machine.graphics
        assert graphics is not None
        try:
            measure_gpu(gpu, cache, sorted(sizes.formats))
        except DeviceMemoryError:
            note = "the GPU has too little free memory to be measured: planned without its speeds"
            self.warnings += [note] if note not in self.warnings else []
        threads = replace(machine.processor, threads=self._threads())
        formats = kernel_formats(self.source.weights)
        with_cpu = with_cpu_speeds(replace(machine, processor=threads), cache, formats, sizes.nbytes)
        return with_gpu(with_cpu, gpu, graphics.free_bytes, cache)

    def _with_disk_speed(self, machine: Machine) -> Machine:
        return with_disk_speed(self._with_cpu_speeds(machine), user_folder("cache"), self.source.file.path)

    def _with_cpu_speeds(self, machine: Machine) -> Machine:
        formats, nbytes = kernel_formats(self.source.weights), self.source.sizes.nbytes
        return with_cpu_speeds(machine, user_folder("cache"), formats, nbytes)

    def _threads(self) -> int:
        options = self.source.options
        return options.threads or measured_threads(user_folder("cache"), options.build_progress)


def load_draft_engine(draft: ModelSource, target: LoadedEngine) -> LoadedEngine:
    """An engine of a draft model in the memory that the target's plan reserves for it: on the target's GPU
    if planned so, else on the CPU.
    """
    request = replace(request_for(draft, SparseSelection(), None), vram=None, ram=None)
    if target.gpu is not None and target.placed.draft not in (None, "cpu"):
        try:
            return _draft_on_gpu(draft, request, target, target.gpu)
        except (GpuUnavailableError, OutOfMemoryError):
            pass
    machine = unmeasured_machine(target.threads)
    processor = replace(machine.processor, free_bytes=machine.processor.total_bytes)
    planned = plan_devices(replace(request, device="cpu"), replace(machine, processor=processor))
    return EngineBuilder(draft, planned, thread_pool=target.thread_pool).build()


def _draft_on_gpu(draft: ModelSource, request: PlanRequest, target: LoadedEngine, gpu: Gpu) -> LoadedEngine:
    from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

    items = [item for item in target.placed.items if item.item in (DRAFT, *SHARED_ITEMS)]
    nbytes = sum(item.bytes for item in items if item.device == target.placed.draft)
    machine = with_gpu(unmeasured_machine(1), gpu, nbytes, user_folder("cache"))
    planned = plan_devices(replace(request, device="cuda"), machine)
    if planned.memory.device != "gpu":
        raise GpuUnavailableError(f"{draft.name}: the GPU has too little free memory for the draft model")
    try:
        return EngineBuilder(draft, planned, gpu).build()
    except DeviceMemoryError as error:
        raise GpuUnavailableError(f"{draft.name}: {error}") from error
