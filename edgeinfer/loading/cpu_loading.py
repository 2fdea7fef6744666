"""Loading a model on the processor: its plan, its kernels, its engine."""

from dataclasses import dataclass, replace
from functools import cached_property

from edgeinfer.errors import OutOfMemoryError, SettingError
from edgeinfer.kv_cache import KVCache
from edgeinfer.loading.memory_items import (
    cache_items,
    largest_context,
    sparse_items,
    weight_items,
    workspace_item,
)
from edgeinfer.loading.model_source import LoadedEngine, ModelSource, Placing
from edgeinfer.loading.sparse_choice import SparseChoice, choose_sparse
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import CacheType
from edgeinfer_kernels.cpu.backend import CpuBackend, kernel_formats, sparse_kernel_formats
from edgeinfer_kernels.cpu.features import choose
from edgeinfer_kernels.cpu.objects import load_kernels
from edgeinfer_kernels.routing import Routing
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights
from edgeinfer_offload.host_memory import host_memory
from edgeinfer_offload.measure import remembered_bandwidth, remembered_threads
from edgeinfer_offload.plan import Device, Item, MemoryPlan, PlanError, Repacking, plan_memory

BATCH = 256
"""Tokens of a prompt that are read in one step."""


def load_on_cpu(source: ModelSource) -> LoadedEngine:
    """An engine of our CPU kernels.

    Raises:
        OutOfMemoryError: it doesn't fit; the text has both numbers and a context that would.
        SettingError: a wish that the CPU can't fulfil.
    """
    wishes, name, weights = source.wishes, source.name, source.weights
    if wishes.kv == "q8_0":
        raise SettingError("kv: q8_0 runs on the GPU only; take f16 or f32 on the CPU (--kv, kv=)")
    isa = choose(wishes.instruction_set)
    sparse = choose_sparse(source)
    needs = _Needs(
        source.specification,
        weights,
        source.context,
        wishes.kv,
        wishes.threads or 1,
        source.config.trained_context,
        wishes.repack,
        sparse,
    )
    # Refused here, before kernels are compiled, if it won't fit whatever the number of threads.
    needs.plan(_budget(wishes.ram), name)
    kernels = load_kernels(
        user_folder("cache"),
        isa,
        kernel_formats(weights, sparse=sparse.layers),
        wishes.build_progress,
        sparse_kernel_formats(weights, sparse.layers),
    )
    threads = wishes.threads or remembered_threads(user_folder("cache"), kernels)
    needs = replace(needs, threads=threads)
    plan = needs.plan(_budget(wishes.ram), name)
    cache = KVCache.allocate(source.specification, source.context, wishes.kv)
    placing = Placing(source)
    backend = CpuBackend(
        source.specification,
        weights,
        cache.layers,
        kernels,
        batch=BATCH,
        threads=threads,
        repack=wishes.repack,
        sparse=sparse.layers,
        routing=Routing.allocate(source.specification, BATCH),
        on_placed=placing,
    )
    repacking = Repacking(backend.repacked_bytes, backend.repack_seconds, placing.released)
    return LoadedEngine(
        Transformer(source.specification, backend, cache, BATCH, needs.bytes_per_token, needs.largest(plan)),
        lambda: replace(needs.plan(plan.device.free_bytes, name, measured=True), repacking=repacking),
        [sparse.note] if sparse.note else [],
    )


@dataclass(frozen=True)
class _Needs:
    """What a model takes with these wishes."""

    specification: DecoderSpecification
    weights: DecoderWeights
    context: int
    kv: CacheType
    threads: int
    trained_context: int
    repack: bool
    sparse: SparseChoice

    @cached_property
    def _fixed(self) -> list[Item]:
        layers = self.sparse.layers
        workspace = workspace_item(self.specification, self.weights, BATCH, self.threads, self.repack, layers)
        if layers:
            items = sparse_items(self.specification, self.weights, layers, self.sparse.token_bytes)
            return [*items, workspace]
        return [*weight_items(self.specification, self.weights, self.repack), workspace]

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of main memory that are taken whatever the context."""
        return sum(item.nbytes for item in self._fixed if not item.mapped)

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads."""
        return sum(item.bytes_per_token for item in self._fixed)

    def largest(self, plan: MemoryPlan) -> int:
        """The largest context that fits what was free."""
        free = plan.device.free_bytes - self._fixed_bytes
        return largest_context(self.specification, self.kv, free, self.trained_context)

    def plan(self, budget: int, name: str, measured: bool = False) -> MemoryPlan:
        """Place all of it in `budget` bytes of main memory; `measured`: with the time that reading takes."""
        rate = remembered_bandwidth(user_folder("cache"), self.threads) if measured else 0.0
        items = [*self._fixed, *cache_items(self.specification, self.context, self.kv)]
        try:
            return plan_memory(items, Device("cpu", budget, rate))
        except PlanError as error:
            free = budget - self._fixed_bytes
            largest = largest_context(self.specification, self.kv, free, self.trained_context)
            way_out = (
                f"with a context of {largest} it fits (--context, context=)"
                if largest
                else "take a smaller model or fewer bits a weight"
            )
            raise OutOfMemoryError(f"{name}: {error}; {way_out}") from error


def _budget(ram: int | None) -> int:
    """Bytes of main memory that may be used: what is free now, or less if the caller says so."""
    free = host_memory().free_bytes
    return free if ram is None else min(free, ram)
