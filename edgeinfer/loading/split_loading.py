"""Loads a split model, which is larger than the GPU's memory, as planned. Imports torch."""

from dataclasses import dataclass

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.file_weights import blocks_in_file, left_in_file, prepare_reading
from edgeinfer.loading.gpu_loading import draft_gpu_bytes, made_ready
from edgeinfer.loading.model_source import LoadedEngine, LoadProgress, ModelSource
from edgeinfer.planning.device_plan import DevicePlan
from edgeinfer.planning.gpu_choice import GpuUnavailableError
from edgeinfer.planning.known_routing import known_routing
from edgeinfer.planning.sparse_choice import SparseChoice
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels, load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, kernel_units
from edgeinfer_kernels.cpu.cpu_shard import CpuShard, ShardOptions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer, most_used
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_kernels.stages import LayerSplit, host_batch
from edgeinfer_offload.machine.this_machine import meets_in_graph
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_text import mebibytes
from edgeinfer_offload.runtime.expert_cache_policy import ExpertCachePolicy
from edgeinfer_offload.runtime.split_backend import SplitBackend


def load_split(source: ModelSource, gpu: Gpu, planned: DevicePlan, sparse: SparseChoice) -> LoadedEngine:
    """An engine with the fastest split between GPU and CPU, as planned.

    Raises:
        DeviceMemoryError: other programs took memory of the GPU.
        GpuUnavailableError: it has no kernels for a part of the model.
    """
    sparse = sparse if planned.memory.wishes.sparse else SparseChoice()
    units = [SERVICE, *kernel_units(source.weights, head=False, sparse=sparse.layers)]
    isa = choose(source.wishes.instruction_set)
    kernels = load_kernels(user_folder("cache"), isa, units, source.wishes.build_progress)
    try:
        loaded = _Sides(source, gpu, planned.memory, kernels, sparse).load()
    except UnsupportedOnDeviceError as error:
        raise GpuUnavailableError(f"{source.name}: {error}") from error
    loaded.notes.extend([kernels.note] if kernels.note else [])
    return loaded


@dataclass(frozen=True)
class _Sides:
    """Both shards of a split model."""

    source: ModelSource
    gpu: Gpu
    plan: MemoryPlan
    kernels: Kernels
    sparse: SparseChoice

    def load(self) -> LoadedEngine:
        """Load both shards. Raises `DeviceMemoryError`."""
        source, plan, facts = self.source, self.plan, self.source.specification
        placing = LoadProgress(source, plan.file_weight_bytes)
        device = cuda_device(self.gpu.index)
        sparse = self.sparse
        exchange_buffer = ExchangeBuffer(device, CHUNK, facts.hidden_size, most_used(facts))
        above = self._on_device(exchange_buffer, placing)
        here = [index for index in facts.indices() if not self._splits[index.layer].on_gpu]
        state = DecoderState.allocate(facts, source.context, source.wishes.kv, here)
        try:
            host = CpuShard(
                facts,
                source.weights,
                self._splits,
                state,
                self.kernels,
                exchange_buffer.addresses,
                ShardOptions(
                    CHUNK,
                    plan.machine.processor.threads,
                    computed=host_batch(CHUNK, plan.prediction.stream_min_tokens),
                    in_file=blocks_in_file(plan, facts),
                    sparse=sparse.layers,
                ),
                placing,
            )
        except BaseException:
            above.close()
            raise
        meets = meets_in_graph(self.gpu, user_folder("cache"))
        refused = above.serve_with(host, meets_in_graph=meets)
        stay = None
        changing = [layer for layer in plan.layers if layer.changing]
        if changing:
            used, slots = most_used(facts), [layer.gpu_experts for layer in changing]
            stay = above.refill_experts(ExpertCachePolicy(changing[0].experts, used, slots))
        engine = NativeEngine(
            facts,
            SplitBackend(host, above),
            source.context,
            CHUNK,
            plan.weight_bytes_per_token,
            source.context,
            source.file.check_size,
        )
        notes = [placed_note(plan), *known_routing(source.file.path, source.sizes)[1]]
        if sparse.note:
            notes.append(sparse.note)
        if plan.wishes.disk:
            notes.append(prepare_reading(source.file, left_in_file(plan, facts, source.weights), plan))
        if stay:
            notes.append(f"experts stay where they are: {stay}")
        if refused:
            notes.append(
                f"{mebibytes(refused)} of weights in main memory couldn't be pinned: prompts send them by "
                "way of buffers that are, which is slower"
            )
        return LoadedEngine(
            engine,
            lambda: plan,
            draft=plan.draft,
            threads=plan.machine.processor.threads,
            gpu=self.gpu,
            draft_gpu_bytes=draft_gpu_bytes(plan),
            notes=notes,
        )

    @property
    def _splits(self) -> tuple[LayerSplit, ...]:
        return tuple(layer.split for layer in self.plan.layers)

    def _on_device(self, exchange_buffer: ExchangeBuffer, placing: LoadProgress) -> CudaBackend:
        source = self.source
        backend = CudaBackend(
            source.specification,
            source.weights,
            source.context,
            cuda_device(self.gpu.index),
            DeviceOptions(
                kv=source.wishes.kv,
                splits=self._splits,
                stream_min_tokens=self.plan.prediction.stream_min_tokens,
            ),
            on_placed=placing,
            exchange_buffer=exchange_buffer,
        )
        return made_ready(backend, self.gpu, source, self.plan.weight_bytes_per_token)


def placed_note(plan: MemoryPlan) -> str:
    """A sentence on which part of a split model is on the GPU."""
    layers = plan.layers
    attention = sum(layer.attention == "gpu" for layer in layers)
    second = "experts" if any(layer.experts for layer in layers) else "feed-forwards"
    return (
        f"on the GPU: attention of {attention} of {len(layers)} layers, "
        f"{plan.feed_forward_share:.0%} of the {second}, "
        + ("the head and the draft model" if plan.draft == "gpu" else "and the head")
        + "; the rest is on the CPU"
        + ("; experts change places as they are asked for" if any(layer.changing for layer in layers) else "")
    )
