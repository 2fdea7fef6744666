"""Loads an engine from a model file, on the devices of the plan."""

from dataclasses import dataclass, field, replace

from edgeinfer.loading.cpu_loading import load_on_cpu
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.planning.device_plan import plan_devices
from edgeinfer.planning.gpu_choice import GpuUnavailableError, usable_gpu
from edgeinfer.planning.plan_request import request_for
from edgeinfer.planning.sparse_choice import SparseChoice, choose_sparse
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, kernel_formats, kernel_units
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.machine.measure import remembered_threads
from edgeinfer_offload.machine.this_machine import measure_gpu, unmeasured_machine, with_cpu_speeds, with_gpu

MAX_ATTEMPTS = 3
"""Number of plans tried while other programs take GPU memory, each with less of it."""
SHARE_LEFT = 0.9


def load_engine(source: ModelSource, draft: ModelSizes | None) -> LoadedEngine:
    """An engine on the requested device; "auto" uses a GPU if possible, or returns the reason why not.

    `draft`: the sizes of its draft model.

    Raises:
        GpuUnavailableError: "cuda" was requested, and no part can run there.
        OutOfMemoryError: it doesn't fit; the text names a context that would.
    """
    sparse = choose_sparse(source)
    wanted = source.wishes.device
    if wanted == "cpu":
        return load_on_cpu(source, sparse, draft)
    try:
        gpu = usable_gpu(wanted)
        if gpu is not None:
            return _GpuLoading(source, gpu, sparse, draft).load()
        return load_on_cpu(source, sparse, draft)
    except GpuUnavailableError as error:
        if wanted != "auto":
            raise
        loaded = load_on_cpu(source, sparse, draft)
        loaded.notes.append(f"running on the CPU: {error}")
        return loaded


@dataclass
class _GpuLoading:
    """Loads a model whose plan uses a GPU. Imports torch."""

    source: ModelSource
    gpu: Gpu
    sparse: SparseChoice
    draft: ModelSizes | None
    notes: list[str] = field(default_factory=list)

    def load(self) -> LoadedEngine:
        """Load all on the GPU, or split as planned; with less GPU memory if other programs take some."""
        from edgeinfer.loading.gpu_loading import load_on_gpu
        from edgeinfer.loading.split_loading import load_split
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

        request = replace(request_for(self.source, self.sparse, self.draft), device="cuda")
        for attempt in range(MAX_ATTEMPTS):
            planned = plan_devices(request, self._unmeasured(), self._measured)
            try:
                if planned.kind == "gpu":
                    loaded = load_on_gpu(self.source, self.gpu, planned)
                else:
                    loaded = load_split(self.source, self.gpu, planned, self.sparse)
            except DeviceMemoryError as error:
                if attempt == MAX_ATTEMPTS - 1:
                    raise GpuUnavailableError(f"{self.source.name}: {error}") from error
                request = replace(request, vram=int(SHARE_LEFT * planned.memory.vram_bytes))
                self.notes.append("other programs took memory of the GPU: less of the model is there")
                continue
            loaded.notes[:0] = self.notes
            return loaded
        raise AssertionError("unreachable")

    def _unmeasured(self) -> Machine:
        """Memory sizes only, which suffices to decide whether all fits the GPU."""
        from edgeinfer_kernels.cuda.device_parts import free_bytes

        machine = unmeasured_machine(1 if self.draft is None else self._threads())
        return with_gpu(machine, self.gpu, free_bytes(self.gpu.index), user_folder("cache"))

    def _measured(self, machine: Machine) -> Machine:
        """The machine with the speeds of CPU, GPU and link, measured on first use."""
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

        cache, sizes, graphics = user_folder("cache"), self.source.sizes, machine.graphics
        assert graphics is not None
        try:
            measure_gpu(self.gpu, cache, sorted({matrix.format for matrix in sizes.matrices()}))
        except DeviceMemoryError:
            note = "the GPU has no room to be measured: planned without its speeds"
            self.notes += [note] if note not in self.notes else []
        threads = replace(machine.processor, threads=self._threads())
        formats = kernel_formats(self.source.weights)
        here = with_cpu_speeds(replace(machine, processor=threads), cache, formats, sizes.nbytes)
        return with_gpu(here, self.gpu, graphics.free_bytes, cache)

    def _threads(self) -> int:
        wishes = self.source.wishes
        if wishes.threads:
            return wishes.threads
        units = [SERVICE, *kernel_units(self.source.weights, head=False, sparse=self.sparse.layers)]
        isa = choose(wishes.instruction_set)
        kernels = load_kernels(user_folder("cache"), isa, units, wishes.build_progress)
        return remembered_threads(user_folder("cache"), kernels)
