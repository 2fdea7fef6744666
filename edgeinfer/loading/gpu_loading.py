"""Loads the part of a model that is on a GPU: memory, tuning and compiled steps. Imports torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from edgeinfer.loading.model_source import LoadedEngine, LoadProgress, ModelSource, planned_specification
from edgeinfer.model_config.layers.block_drafts import BlockDraftModel
from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.model_config.layers.medusa_heads import MedusaModel
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.layout import BATCH, PAGES, TEXT, Layout
from edgeinfer_kernels.cuda.current_device import current
from edgeinfer_kernels.cuda.device_memory import KernelsUnavailableError
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device
from edgeinfer_kernels.cuda.draft.assistant_backend import AssistantBackend
from edgeinfer_kernels.cuda.draft.block_backend import BlockBackend
from edgeinfer_kernels.cuda.draft.head_backend import FirstHead, HeadBackend
from edgeinfer_kernels.cuda.draft.medusa_backend import MedusaBackend
from edgeinfer_kernels.cuda.draft.promptless_head import PromptlessHead
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer, max_experts_per_token
from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.sizes.cuda_buffers import ALL_STEP_SIZES, CHUNK, COMMON_STEP_SIZES, KEPT_STATES
from edgeinfer_kernels.sizes.model_sizes import PER_LAYER
from edgeinfer_offload.planner.memory_plan import MemoryPlan

TUNING_SECONDS = 9.0
"""Time limit for tuning the tile configs of a step, once per GPU and model shape. On an H200 as good as
twenty seconds (8B in Q4_0, Q4_K_M, Q8_0: 667, 607, 459 tokens/s, with twenty 666, 604, 454)."""
TUNED_FROM_BYTES = 200 << 20
"""Weight bytes per token below which a step is bound by latency, and tuning doesn't help."""

B = TypeVar("B", bound=CudaBackend)
H = TypeVar("H", bound=PromptlessHead)


def exchange_buffer(gpu: Gpu, spec: DecoderSpec) -> ExchangeBuffer:
    """The buffer through which a GPU and the CPU exchange hidden states and selected experts."""
    device = cuda_device(gpu.index)
    with current(device):
        return ExchangeBuffer(device, CHUNK, spec.hidden_size, max_experts_per_token(spec))


def load_on_gpu(source: ModelSource, gpu: Gpu, plan: MemoryPlan, progress: LoadProgress) -> CudaBackend:
    """The weights, caches and buffers of a whole model on a GPU, ready for steps.

    Raises:
        GpuUnavailableError: the model has a matrix without a GPU kernel, or the kernels can't be compiled.
        DeviceMemoryError: other programs took memory of the GPU.
    """
    options = _planned_options(source, plan)
    with _refusals(source):
        backend = CudaBackend(
            planned_specification(source, plan),
            source.weights,
            pool_positions(source.context, plan.options.sequences),
            cuda_device(gpu.index),
            options,
            on_loaded=progress,
        )
    return prepared(backend, gpu, source, plan)


def load_gpu_shard(
    source: ModelSource, gpu: Gpu, plan: MemoryPlan, exchange: ExchangeBuffer, progress: LoadProgress
) -> GpuShard:
    """The part of a split model that is on a GPU. Raises as `load_on_gpu`."""
    options = replace(
        _planned_options(source, plan),
        stages=plan.stages,
        stream_min_tokens=plan.prediction.stream_min_tokens,
    )
    with _refusals(source):
        shard = GpuShard(
            planned_specification(source, plan),
            source.weights,
            pool_positions(source.context, plan.options.sequences),
            cuda_device(gpu.index),
            options,
            exchange,
            on_loaded=progress,
        )
    return prepared(shard, gpu, source, plan)


def _planned_options(source: ModelSource, plan: MemoryPlan) -> DeviceOptions:
    return DeviceOptions(
        kv=source.options.kv,
        chunk=plan.options.chunk,
        per_layer_here=any(item.item == PER_LAYER and item.device == "gpu" for item in plan.items),
        gathered=tuple(index for index, layer in enumerate(plan.layers) if layer.gathers),
        sequences=plan.options.sequences if planned_specification(source, plan).is_recurrent else 1,
        kept_states=KEPT_STATES if plan.has_gpu_head else 0,
        kept_layers=kept_layers(plan),
    )


def kept_layers(plan: MemoryPlan) -> tuple[int, ...]:
    """After how many layers a planned draft head reads states; empty: after the output norm, or none."""
    return () if plan.options.draft is None else plan.options.draft.target_layers


@contextmanager
def _refusals(source: ModelSource) -> Iterator[None]:
    """A matrix without a kernel is an error of this model."""
    try:
        yield
    except UnsupportedOnDeviceError as error:
        raise GpuUnavailableError(f"{source.name}: {error}") from error


def _gpu_shard_of(target: LoadedEngine) -> tuple[CudaBackend, Gpu]:
    """The part of a loaded model that is on its GPU."""
    backend: Any = target.engine.backend
    shard = backend if isinstance(backend, CudaBackend) else backend.gpu_shard
    assert isinstance(shard, CudaBackend)
    assert target.gpu is not None
    return shard, target.gpu


def load_gpu_heads(heads: Sequence[DraftHeadModel], source: ModelSource, target: LoadedEngine) -> CudaBackend:
    """The draft heads of a file on the GPU of their target.

    Raises:
        GpuUnavailableError: the head has a matrix without a GPU kernel, or its kernels can't be compiled.
        DeviceMemoryError: other programs took memory of the GPU.
    """
    backend, gpu = _gpu_shard_of(target)
    loaded = gpu_heads(heads, source, backend, target.placed.options.chunk)
    return warmed_up(loaded, gpu, ALL_STEP_SIZES, source.options.build_progress, (TEXT,))


def gpu_heads(
    heads: Sequence[DraftHeadModel], source: ModelSource, backend: CudaBackend, chunk: int
) -> CudaBackend:
    """The draft heads of a file next to the part of their target that is on a GPU. They read its embedding
    and its output there; if it has none, or only rows of the output, they have one copy together.

    Raises as `load_gpu_heads`, but compiles nothing.
    """
    loaded, table, output = list[Any](), backend.table, backend.output
    try:
        for head in heads:
            shared = backend.as_target(
                None if head.own_embedding else table, None if head.own_output else output
            )
            kind: type[CudaBackend] = HeadBackend if loaded or len(heads) == 1 else FirstHead
            if isinstance(head, BlockDraftModel):
                kind = BlockBackend
            with _refusals(source):
                own = kind(
                    head.spec,
                    head.weights,
                    pool_positions(source.context, 1),
                    backend.device,
                    DeviceOptions(kv=source.options.kv, chunk=chunk, target=shared),
                    tuning=backend.step.tuning,
                )
            loaded.append(own)
            table = table or (None if head.own_embedding else own.table)
            output = output or (None if head.own_output else own.output)
    except BaseException:
        for each in loaded:
            each.close()
        raise
    first: CudaBackend = loaded[0]
    if isinstance(first, FirstHead):
        first.lead(loaded[1:])
    return first


def load_gpu_medusa(heads: MedusaModel, source: ModelSource, target: LoadedEngine) -> MedusaBackend:
    """Medusa heads on the GPU of their target. Raises as `load_gpu_heads`."""
    backend, gpu = _gpu_shard_of(target)
    return _warmed_up_head(gpu_medusa(heads, source, backend), gpu)


def gpu_medusa(heads: MedusaModel, source: ModelSource, backend: CudaBackend) -> MedusaBackend:
    """As `gpu_heads`, of Medusa heads."""
    context, launches = pool_positions(source.context, 1), backend.step.launches
    shared = backend.as_target(launches.model.embedding, None)
    with _refusals(source):
        return MedusaBackend(
            heads.spec,
            heads.weights,
            context,
            backend.device,
            shared,
            launches.tuning,
            dependent=launches.dependent,
        )


def load_gpu_assistant(head: DraftHeadModel, source: ModelSource, target: LoadedEngine) -> AssistantBackend:
    """A Gemma 4 assistant on the GPU of its target. Raises as `load_gpu_heads`."""
    backend, gpu = _gpu_shard_of(target)
    launches = backend.step.launches
    own = head.with_embedding_of(target.engine.specification, source.weights.token_embd)
    shared = backend.as_target(backend.table, None, head.target_caches)
    with _refusals(source):
        loaded = AssistantBackend(
            own.spec,
            own.weights,
            pool_positions(source.context, 1),
            backend.device,
            shared,
            launches.tuning,
            kv=source.options.kv,
            dependent=launches.dependent,
        )
    return _warmed_up_head(loaded, gpu)


def warm_up_drafts(loaded: HeadBackend, gpu: Gpu, *, trees: bool) -> None:
    """As `HeadBackend.warm_up_drafts`, so that no completion waits for captures. Raises
    `GpuUnavailableError`; the head is closed then.
    """
    with _closing_if_unavailable(loaded, gpu):
        loaded.warm_up_drafts(trees=trees)


def _warmed_up_head(loaded: H, gpu: Gpu) -> H:
    """The head with its drafts captured. Raises `GpuUnavailableError`."""
    with _closing_if_unavailable(loaded, gpu):
        loaded.warm_up()
    return loaded


@contextmanager
def _closing_if_unavailable(loaded: CudaBackend | PromptlessHead, gpu: Gpu) -> Iterator[None]:
    """An exception in this context closes the backend; that of a GPU becomes a `GpuUnavailableError`."""
    try:
        yield
    except BaseException as error:
        loaded.close()
        if isinstance(error, KernelsUnavailableError | BackendError):
            raise GpuUnavailableError(f"{gpu.name}: {error}") from error
        raise


def prepared(backend: B, gpu: Gpu, source: ModelSource, plan: MemoryPlan) -> B:
    """The backend, tuned for this GPU if its step reads enough, with its steps compiled; of all token counts
    if drafts need them, and of batches if several sequences are planned. Raises `GpuUnavailableError`.
    """
    drafts = source.options.drafts_on_gpu(has_head=plan.has_gpu_head)
    widths = ALL_STEP_SIZES if drafts else COMMON_STEP_SIZES
    can = backend.capabilities
    has_batches = plan.options.sequences > 1 and can.max_batch_tokens + can.max_joined_tokens > 0
    layouts: tuple[Layout, ...] = (TEXT, BATCH) if has_batches else (TEXT,)
    if can.has_separate_states:
        layouts = (TEXT, PAGES, BATCH)
    tunes = plan.weight_bytes_per_token >= TUNED_FROM_BYTES and not source.specification.is_encoder
    return warmed_up(backend, gpu, widths, source.options.build_progress, layouts, tunes=tunes)


def warmed_up(
    backend: B,
    gpu: Gpu,
    widths: tuple[int, ...],
    on_compiled: OnCompiled | None,
    layouts: tuple[Layout, ...],
    *,
    tunes: bool = False,
) -> B:
    """The backend with its steps compiled, first tuned if it `tunes`. Raises as `prepared`."""
    with _closing_if_unavailable(backend, gpu):
        if tunes:
            backend.tune(user_folder("cache") / "gpu", TUNING_SECONDS)
        backend.warm_up(widths, on_compiled, layouts)
    return backend
