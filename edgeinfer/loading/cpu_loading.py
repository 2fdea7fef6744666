"""Loads a model on the CPU as planned: kernels, cache, engine."""

from dataclasses import replace

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.file_weights import left_in_file, prepare_reading
from edgeinfer.loading.model_source import LoadedEngine, LoadProgress, ModelSource
from edgeinfer.planning.device_plan import DevicePlan, PlanRequest, plan_devices
from edgeinfer.planning.plan_request import request_for
from edgeinfer.planning.sparse_choice import SparseChoice
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels, load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_formats, kernel_units
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.decoder_state import DecoderState, Routing
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.machine.measure import remembered_threads
from edgeinfer_offload.machine.this_machine import unmeasured_machine, with_cpu_speeds
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import CPU_BATCH, Repacking


def load_on_cpu(source: ModelSource, sparse: SparseChoice, draft: ModelSizes | None) -> LoadedEngine:
    """An engine with the CPU kernels. `draft`: sizes of the draft model, which is loaded next.

    Raises:
        OutOfMemoryError: it doesn't fit; the text has both numbers and a context that would.
        SettingError: an option that the CPU doesn't support.
    """
    wishes = source.wishes
    request = replace(request_for(source, sparse, draft), device="cpu")
    # Before kernels are compiled: a model that doesn't fit with the fewest threads is refused.
    planned = plan_devices(request, unmeasured_machine(wishes.threads or 1))
    kernels = _kernels(source, sparse, planned)
    threads = wishes.threads or remembered_threads(user_folder("cache"), kernels)
    machine = unmeasured_machine(threads)
    final = plan_devices(request, machine)
    if final.memory.wishes.sparse != planned.memory.wishes.sparse:  # more threads take more memory
        kernels = _kernels(source, sparse, final)
    return _loaded(source, sparse, kernels, request, machine, final)


def load_draft_on_cpu(source: ModelSource, pool: ThreadPool | None, threads: int) -> LoadedEngine:
    """Load a draft model for which the plan has memory. `pool`: the target's thread pool, if it is on the
    CPU.
    """
    request = replace(request_for(source, SparseChoice(), None), device="cpu", ram=None)
    machine = unmeasured_machine(threads)
    processor = replace(machine.processor, free_bytes=machine.processor.total_bytes)
    machine = replace(machine, processor=processor)
    planned = plan_devices(request, machine)
    kernels = _kernels(source, SparseChoice(), planned)
    return _loaded(source, SparseChoice(), kernels, request, machine, planned, pool)


def _kernels(source: ModelSource, sparse: SparseChoice, planned: DevicePlan) -> Kernels:
    layers = sparse.layers if planned.memory.wishes.sparse else {}
    units = kernel_units(source.weights, sparse=layers)
    isa = choose(source.wishes.instruction_set)
    return load_kernels(user_folder("cache"), isa, units, source.wishes.build_progress)


def _loaded(
    source: ModelSource,
    sparse: SparseChoice,
    kernels: Kernels,
    request: PlanRequest,
    machine: Machine,
    planned: DevicePlan,
    pool: ThreadPool | None = None,
) -> LoadedEngine:
    wishes, weights, plan = source.wishes, source.weights, planned.memory
    layers = sparse.layers if plan.wishes.sparse else {}
    in_file = left_in_file(plan, source.specification, weights) if wishes.repack else weights.matrices()
    notes = [note for note in (kernels.note, *planned.notes) if note]
    if sparse.note and not plan.wishes.disk:
        notes.append(sparse.note)
    if plan.wishes.disk:
        notes.append(prepare_reading(source.file, in_file, plan))
    state = DecoderState.allocate(source.specification, source.context, wishes.kv)
    placing = LoadProgress(source, plan.file_weight_bytes)
    backend = CpuBackend(
        source.specification,
        weights,
        state,
        kernels,
        CpuOptions(CPU_BATCH, machine.processor.threads, in_file, layers),
        routing=Routing.allocate(source.specification, CPU_BATCH),
        on_placed=placing,
        pool=pool,
    )
    repacking = Repacking(backend.repacked_bytes, backend.repack_seconds, placing.released)
    engine = NativeEngine(
        source.specification,
        backend,
        source.context,
        CPU_BATCH,
        plan.weight_bytes_per_token,
        planned.fitting,
        source.file.check_size,
    )

    def full_plan() -> MemoryPlan:
        formats, nbytes = kernel_formats(weights), request.sizes.nbytes
        measured = with_cpu_speeds(machine, user_folder("cache"), formats, nbytes)
        return replace(planned.on(request.sizes, measured), repacking=repacking)

    return LoadedEngine(
        engine, full_plan, draft=plan.draft, notes=notes, pool=backend.pool, threads=backend.pool.threads
    )
