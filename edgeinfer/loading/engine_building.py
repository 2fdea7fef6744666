"""Builds an engine that executes the stages of a plan: on the CPU, on a GPU, or split between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from edgeinfer.engine.encoder_engine import EncoderEngine
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.ring_positions import RingPositions
from edgeinfer.errors import Detail
from edgeinfer.loading.file_weights import blocks_in_file, left_in_file, prepare_reading, streamed_file
from edgeinfer.loading.model_source import LoadedEngine, LoadProgress, ModelSource, planned_specification
from edgeinfer.planning.planned_devices import DevicePlan
from edgeinfer.planning.sparse_selection import SparseSelection
from edgeinfer.snapshots.spilled_pages import SpillBudget
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels, load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, kernel_formats, kernel_units
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cpu.sparse import SparseLayers
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.decoder_state import DecoderState, Routing, StatePool
from edgeinfer_kernels.stages import CPU, host_batch, stage_blocks
from edgeinfer_offload.machine.this_machine import meets_in_graph, with_cpu_speeds
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import DRAFT, DRAFT_HEAD, Repacking
from edgeinfer_offload.planner.several_gpus.pipeline_plan import PipelinePlan
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_offload.report.plan_verdict import binary_size

if TYPE_CHECKING:  # imported only for a GPU, with torch
    from edgeinfer_kernels.cpu.cpu_shard import CpuShard
    from edgeinfer_kernels.cuda.backend import CudaBackend
    from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
    from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
    from edgeinfer_offload.runtime.split_backend import SplitBackend


SPILLED_CACHES = 4
"""Idle prefixes take at most this multiple of the cache by default."""


@dataclass(frozen=True)
class EngineBuilder:
    """Builds the engine of a plan. `gpu`: the GPU that the plan uses; `thread_pool`: that of another engine,
    to share.
    """

    source: ModelSource
    planned: DevicePlan
    gpu: Gpu | None = None
    sparse: SparseSelection = field(default_factory=SparseSelection)
    thread_pool: ThreadPool | None = None
    gpus: tuple[Gpu, ...] = ()
    """The GPUs of the plan, in its order, if it has several."""

    def build(self) -> LoadedEngine:
        """An engine with the devices and shards of the plan's stages.

        Raises:
            GpuUnavailableError: the GPU has no kernels for a part of the model, or can't compile them.
            DeviceMemoryError: other programs took memory of the GPU.
        """
        kinds = {device.kind for device in self.plan.devices}
        if kinds == {"cpu"}:
            return self._on_cpu()
        if isinstance(self.plan, PipelinePlan):
            return self._pipeline(self.plan)
        if isinstance(self.plan, TensorPlan):
            return self._tensor_parallel(self.plan)
        if kinds == {"gpu"}:
            return self._on_gpu()
        backend, warnings = self.split_backend()
        return self._with_states(backend, backend.gpu_shard, self.plan.options.batch, warnings)

    @property
    def plan(self) -> MemoryPlan:
        return self.planned.memory

    def _on_gpu(self) -> LoadedEngine:
        from edgeinfer.loading.gpu_loading import load_on_gpu

        assert self.gpu is not None
        backend = load_on_gpu(self.source, self.gpu, self.plan, LoadProgress(self.source))
        return self._with_states(backend, backend, self.plan.options.chunk)

    def _with_states(
        self, backend: Backend[Any], shard: "CudaBackend", batch: int, warnings: Sequence[str] = ()
    ) -> LoadedEngine:
        """The engine of a backend, and those of the other states that the GPU's `shard` holds."""
        loaded = self._loaded(backend, batch, warnings, len(shard.pool.states))
        loaded.engine.join(shard.pool)
        return loaded

    def _on_cpu(self) -> LoadedEngine:
        source, plan = self.source, self.plan
        has_head, batch = not source.specification.is_encoder, plan.options.batch
        kernels, progress = self._kernels(head=has_head), LoadProgress(source, plan.file_weight_bytes)
        threads = plan.machine.processor.threads
        pool = sequence_states(
            source.specification, source.context, source.options.kv, plan.options.sequences
        )
        backend = CpuBackend(
            source.specification,
            source.weights,
            pool.states[0],
            kernels,
            CpuOptions(
                batch,
                threads,
                in_file := self._left_in_file(),
                self._sparse_layers,
                has_head,
                bundles=self._bundles,
                streamed=streamed_file(source.file, in_file) if plan.reads_ahead else None,
            ),
            routing=Routing.allocate(source.specification, batch),
            on_loaded=progress,
            pool=self.thread_pool,
        )
        repacking = Repacking(backend.repacked_bytes, backend.repack_seconds, progress.released)
        loaded = self._loaded(backend, batch, self._cpu_warnings(kernels), len(pool.states))
        loaded.engine.join(pool)
        return replace(loaded, plan=self._measured(repacking), thread_pool=backend.pool)

    def split_backend(self) -> "tuple[SplitBackend, list[str]]":
        """The backend of a plan with one GPU and the CPU, and warnings for the user."""
        from edgeinfer.loading.gpu_loading import exchange_buffer, load_gpu_shard
        from edgeinfer_offload.runtime.split_backend import SplitBackend

        source, plan = self.source, self.plan
        assert self.gpu is not None
        kernels, progress = self._kernels(head=False), LoadProgress(source, plan.file_weight_bytes)
        exchange = exchange_buffer(self.gpu, source.specification)
        gpu_shard = load_gpu_shard(source, self.gpu, plan, exchange, progress)
        try:
            cpu_shard = self._cpu_shard(exchange, kernels, progress)
        except BaseException:
            gpu_shard.close()
            raise
        meets = meets_in_graph(self.gpu, user_folder("cache"))
        unpinned = gpu_shard.serve_with(cpu_shard, meets_in_graph=meets)
        warnings = [Detail(placed_note(plan)), *self._cpu_warnings(kernels)]
        if refusal := self._begin_expert_cache(gpu_shard):
            warnings.append(Detail(f"there is no expert cache: {refusal}"))
        if self._sparse_layers and any(layer.has_some_experts for layer in plan.layers):
            warnings.append(Detail("the experts on the GPU don't change: sparse ones have no expert cache"))
        if unpinned:
            warnings.append(
                f"{binary_size(unpinned)} of weights in main memory couldn't be pinned: prompts stream them "
                "through pinned buffers, which is slower"
            )
        return SplitBackend(cpu_shard, gpu_shard), warnings

    def _pipeline(self, plan: PipelinePlan) -> LoadedEngine:
        from edgeinfer.loading.pipeline_loading import load_pipeline

        first = partial(EngineBuilder, gpu=self.gpus[0])
        backend, warnings = load_pipeline(self.source, self.gpus, plan, first)
        loaded = self._loaded(backend, plan.options.chunk, [Detail(str(plan.limit_reason)), *warnings])
        return replace(loaded, gpu=self.gpus[-1]) if plan.has_gpu_head else loaded

    def _tensor_parallel(self, plan: TensorPlan) -> LoadedEngine:
        from edgeinfer.loading.tensor.loading import load_tensor_parallel

        backend = load_tensor_parallel(self.source, self.gpus, plan)
        sums = f"sums by {backend.ranks[0].sums}"
        loaded = self._loaded(backend, plan.options.chunk, [Detail(f"{plan.limit_reason}; {sums}")])
        return replace(loaded, gpu=self.gpus[plan.draft_rank])

    def _cpu_shard(self, exchange: "ExchangeBuffer", kernels: Kernels, progress: LoadProgress) -> "CpuShard":
        from edgeinfer_kernels.cpu.cpu_shard import CpuShard, ShardOptions

        source, plan, spec = self.source, self.plan, planned_specification(self.source, self.plan)
        blocks = list(chain.from_iterable(stage_blocks(spec, CPU, plan.stages)))
        return CpuShard(
            spec,
            source.weights,
            plan.stages,
            DecoderState.allocate(
                spec,
                pool_positions(source.context, plan.options.sequences),
                source.options.kv,
                blocks,
                plan.options.sequences,
            ),
            kernels,
            exchange.addresses,
            ShardOptions(
                plan.options.batch,
                plan.machine.processor.threads,
                computed=host_batch(plan.options.batch, plan.prediction.stream_min_tokens),
                in_file=blocks_in_file(plan, spec),
                sparse=self._sparse_layers,
            ),
            progress,
        )

    @property
    def _sparse_layers(self) -> SparseLayers:
        return self.sparse.planned(self.plan.options.sparse)[0]

    @property
    def _bundles(self) -> Bundles | None:
        return self.sparse.planned(self.plan.options.sparse)[1]

    def _begin_expert_cache(self, gpu_shard: "GpuShard") -> str | None:
        """Enable the expert cache if it is planned; None, or the reason why the experts stay fixed."""
        cached = [layer for layer in self.plan.layers if layer.expert_cache]
        if not cached:
            return None
        from edgeinfer_offload.runtime.expert_cache_policy import ExpertCachePolicy

        routed = [layer.routed for layer in self.source.sizes.layers if layer.routed]
        experts_per_token = max(block.granules_per_token for block in routed)
        slots = [layer.gpu_experts for layer in cached]
        return gpu_shard.start_expert_cache(ExpertCachePolicy(cached[0].experts, experts_per_token, slots))

    def _kernels(self, *, head: bool) -> Kernels:
        """The CPU kernels; without the `head`, those that serve a GPU."""
        needed = kernel_units(self.source.weights, head=head, sparse=self._sparse_layers)
        units = [*([] if head else [SERVICE]), *needed]
        options = self.source.options
        isa = choose(options.instruction_set)
        return load_kernels(user_folder("cache"), isa, units, options.build_progress)

    def _left_in_file(self) -> Sequence[Any]:
        source = self.source
        if not self.plan.options.repack:
            return source.weights.matrices(head=not source.specification.is_encoder)
        return left_in_file(self.plan, source.specification, source.weights)

    def _cpu_warnings(self, kernels: Kernels) -> list[str]:
        warnings = [kernels.warning] if kernels.warning else []
        if self.sparse.note and self.plan.options.sparse == self.sparse.options:
            warnings.append(self.sparse.note)
        if (bundles := self._bundles) is not None:
            warnings.append(self.sparse.window_note(bundles.slots))
        if self.plan.options.disk or self.plan.options.repack != self.source.options.repack:
            warnings.append(prepare_reading(self.source.file, self._left_in_file(), self.plan))
        return warnings

    def _measured(self, repacking: Repacking) -> Callable[[], MemoryPlan]:
        """Returns the plan with the CPU's speeds, which don't change the placement."""
        source, plan = self.source, self.plan

        def measured() -> MemoryPlan:
            formats, nbytes = kernel_formats(source.weights), source.sizes.nbytes
            machine = with_cpu_speeds(plan.machine, user_folder("cache"), formats, nbytes)
            return replace(self.planned.on(source.sizes, machine), repacking=repacking)

        return measured

    def _loaded(
        self, backend: Backend[Any], batch: int, warnings: Sequence[str] = (), states: int = 1
    ) -> LoadedEngine:
        """`states`: in which the plan's sequences are stored."""
        source, plan = self.source, self.plan
        reads_file = any(device.kind == "cpu" for device in plan.devices)
        engine_class = EncoderEngine if source.specification.is_encoder else NativeEngine
        engine = engine_class(
            planned_specification(source, plan),
            backend,
            source.context,
            batch,
            plan.weight_bytes_per_token,
            self.planned.fitting,
            source.file.check_size if reads_file else None,
            pool_positions(source.context, plan.options.sequences) if states == 1 else None,
        )
        engine.spill = self._spill_budget(states * engine.cache.nbytes)
        warnings = [*self.planned.warnings, *warnings]
        if not backend.capabilities.max_batch_tokens and engine.spill.ram:
            size, each = binary_size(engine.spill.ram), binary_size(engine.cache.nbytes)
            warnings.append(Detail(f"{size} of idle texts are kept in main memory, each at most {each}"))
        return LoadedEngine(engine, plan, lambda: plan, self.gpu, None, warnings)

    def _spill_budget(self, cache_bytes: int) -> SpillBudget:
        """Bytes for idle prefixes: as requested, or half of what main memory has besides the plan, at most a
        multiple of all caches, if several requests are answered.
        """
        plan, options = self.plan, self.source.options
        free = plan.ram_bytes - plan.bytes_on("cpu")
        automatic = min(free // 2, SPILLED_CACHES * cache_bytes) if options.parallel != 1 else 0
        ram = max(0, automatic) if options.spill is None else options.spill
        return SpillBudget(ram, options.spill_disk or 0)


def sequence_states(spec: DecoderSpec, context: int, kind: CacheType, sequences: int) -> StatePool:
    """The states of some sequences: one for all if all its positions can be pages, else one for each."""
    positions = pool_positions(context, sequences)
    if sequences > 1 and (spec.is_recurrent or RingPositions(spec, positions).shapes):
        return DecoderState.allocate(spec, context, kind).pooled(sequences)
    state = DecoderState.allocate(spec, positions, kind, sequences=sequences)
    return StatePool([state], state)


def placed_note(plan: MemoryPlan) -> str:
    """A sentence on which part of a split model is on the GPU."""
    layers = plan.layers
    attention = sum(layer.attention == "gpu" for layer in layers)
    second = "experts" if any(layer.experts for layer in layers) else "feed-forwards"
    drafter = DRAFT_HEAD if plan.has_gpu_head else DRAFT
    return (
        f"on the GPU: attention of {attention} of {len(layers)} layers, "
        f"{plan.feed_forward_share:.0%} of the {second}, "
        + (f"the head and the {drafter}" if plan.draft == "gpu" else "and the head")
        + "; the rest is on the CPU"
        + ("; the experts change while decoding" if any(layer.expert_cache for layer in layers) else "")
    )
