"""Loading a model on the processor: its plan, its kernels, its engine."""

from dataclasses import dataclass, replace

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.kv_cache import KVCache
from edgeinfer.loading.file_weights import left_in_file, prepare_reading
from edgeinfer.loading.model_source import LoadedEngine, ModelSource, Placing
from edgeinfer.loading.sparse_choice import SparseChoice, choose_sparse
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.features import choose
from edgeinfer_kernels.cpu.kernel_units import kernel_formats, kernel_units
from edgeinfer_kernels.cpu.objects import load_kernels
from edgeinfer_kernels.cpu.threads import Team
from edgeinfer_kernels.routing import Routing
from edgeinfer_offload.machine import Machine
from edgeinfer_offload.measure import remembered_threads
from edgeinfer_offload.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.plan import largest_context, plan_memory
from edgeinfer_offload.plan_facts import CPU_BATCH, PlanWishes, Repacking, SparseWish
from edgeinfer_offload.this_machine import unmeasured_machine, with_cpu_speeds


def load_on_cpu(source: ModelSource, team: Team | None = None, *, disk: bool = True) -> LoadedEngine:
    """An engine of our CPU kernels. `team`: the threads of another one, to take turns with. `disk`: weights
    that main memory can't hold at any context may stay in the file.

    Raises:
        OutOfMemoryError: it doesn't fit; the text has both numbers and a context that would.
        SettingError: a wish that the CPU can't fulfil.
    """
    wishes, weights = source.wishes, source.weights
    isa = choose(wishes.instruction_set)
    planning, sparse = _decided(source, disk)
    kernels = load_kernels(
        user_folder("cache"),
        isa,
        kernel_units(weights, sparse=sparse.layers),
        wishes.build_progress,
    )
    threads = team.threads if team else wishes.threads or remembered_threads(user_folder("cache"), kernels)
    planning = replace(planning, machine=unmeasured_machine(threads))
    plan = planning.plan()
    in_file = left_in_file(plan, weights) if wishes.repack else weights.matrices()
    notes = [note for note in (kernels.note, sparse.note) if note]
    if plan.wishes.disk:
        notes.append(prepare_reading(source.file, in_file, plan))
    cache = KVCache.allocate(source.specification, source.context, wishes.kv)
    placing = Placing(source, plan.file_weight_bytes)
    backend = CpuBackend(
        source.specification,
        weights,
        cache.layers,
        kernels,
        batch=CPU_BATCH,
        threads=threads,
        in_file=in_file,
        sparse=sparse.layers,
        routing=Routing.allocate(source.specification, CPU_BATCH),
        on_placed=placing,
        team=team,
    )
    repacking = Repacking(backend.repacked_bytes, backend.repack_seconds, placing.released)
    engine = Transformer(
        source.specification,
        backend,
        cache,
        CPU_BATCH,
        plan.weight_bytes_per_token,
        planning.largest_context(),
        source.file.check_size,
    )
    return LoadedEngine(
        engine,
        lambda: replace(planning.with_speeds().plan(), repacking=repacking),
        plan.bytes_on("cpu"),
        notes=notes,
        team=backend.team,
    )


def _decided(source: ModelSource, disk: bool) -> tuple["_Planning", SparseChoice]:
    """Whether weights stay in the file, and which layers are sparse.

    Raises `OutOfMemoryError`, before kernels are compiled, if it won't fit whatever the number of threads.
    """
    sparse = choose_sparse(source)
    planning = _Planning(source, unmeasured_machine(source.wishes.threads or 1), sparse.wish)
    try:
        planning.plan()
    except OutOfMemoryError:
        if not disk or not planning.may_leave_weights:
            raise
        sparse, planning = SparseChoice(), replace(planning, sparse=None, disk=True)
        planning.plan()
    return planning, sparse


@dataclass(frozen=True)
class _Planning:
    """The plan of everything on the CPU of this machine; `disk`: but for what its memory can't hold."""

    source: ModelSource
    machine: Machine
    sparse: SparseWish | None
    disk: bool = False

    @property
    def _wishes(self) -> PlanWishes:
        wishes = self.source.wishes
        return PlanWishes(
            context=self.source.context,
            kv=wishes.kv,
            device="cpu",
            ram=wishes.ram,
            repack=wishes.repack,
            sparse=self.sparse,
            disk=self.disk,
        )

    @property
    def may_leave_weights(self) -> bool:
        """Whether the file may hold what main memory can't: where no shorter context helps, and no wish has
        layouts of its own.
        """
        wishes = self.source.wishes
        return wishes.repack and not wishes.asks_sparse and not self.largest_context()

    def plan(self) -> MemoryPlan:
        """Raises `OutOfMemoryError`."""
        try:
            return plan_memory(self.source.sizes, self.machine, self._wishes)
        except PlanError as error:
            largest = self.largest_context()
            way_out = (
                f"with a context of {largest} it fits (--context, context=)"
                if largest
                else "take a smaller model or fewer bits a weight"
            )
            raise OutOfMemoryError(f"{self.source.name}: {error}; {way_out}") from error

    def largest_context(self) -> int:
        """The largest context that fits what is free."""
        return largest_context(
            self.source.sizes, self.machine, self._wishes, self.source.config.trained_context
        )

    def with_speeds(self) -> "_Planning":
        """The same with how fast weights are read, measured on first use."""
        source = self.source
        formats = kernel_formats(source.weights)
        machine = with_cpu_speeds(self.machine, user_folder("cache"), formats, source.sizes.nbytes)
        return replace(self, machine=machine)
