"""Loading a model that is larger than the GPU: divided between it and the CPU as planned. Imports torch."""

from dataclasses import dataclass, replace

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.kv_cache import KVCache
from edgeinfer.loading.draft_sizes import draft_sizes
from edgeinfer.loading.file_weights import blocks_in_file, left_in_file, prepare_reading
from edgeinfer.loading.gpu_choice import GpuUnavailableError
from edgeinfer.loading.gpu_loading import made_ready
from edgeinfer.loading.known_routing import known_routing
from edgeinfer.loading.model_source import DraftRoom, LoadedEngine, ModelSource, Placing
from edgeinfer.loading.sparse_choice import SparseChoice, choose_sparse
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.features import choose
from edgeinfer_kernels.cpu.host_half import HostHalf
from edgeinfer_kernels.cpu.kernel_units import SERVICE, kernel_formats, kernel_units
from edgeinfer_kernels.cpu.objects import Kernels, load_kernels
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.buffer_sizes import CHUNK
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, cuda_device, free_bytes
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.mailbox import Mailbox, most_used
from edgeinfer_kernels.division import LayerDivision, host_batch
from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_offload.expert_slots import ExpertSlots
from edgeinfer_offload.machine import Machine
from edgeinfer_offload.measure import remembered_threads
from edgeinfer_offload.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.plan import largest_context, plan_memory
from edgeinfer_offload.plan_facts import DRAFT, SHARED_ITEMS, PlanWishes, SparseWish
from edgeinfer_offload.plan_text import mebibytes
from edgeinfer_offload.split_backend import SplitBackend
from edgeinfer_offload.this_machine import (
    measure_gpu,
    meets_in_graph,
    unmeasured_machine,
    with_cpu_speeds,
    with_gpu,
)

ATTEMPTS = 3
"""Plans that are tried while other programs take memory of the GPU, each with less of it."""
SHARE_LEFT = 0.9


def load_split(source: ModelSource, gpu: Gpu) -> LoadedEngine:
    """An engine with as much on the GPU as makes it fastest, the rest on the CPU.

    Raises:
        GpuUnavailableError: nothing of it fits the GPU, or it has no kernels for it, or main memory is too
            small for the rest whatever the context.
        OutOfMemoryError: a smaller context would fit.
    """
    wishes, cache_folder = source.wishes, user_folder("cache")
    sparse = choose_sparse(source) if wishes.asks_sparse else SparseChoice()
    kernels = load_kernels(
        cache_folder,
        choose(wishes.instruction_set),
        [SERVICE, *kernel_units(source.weights, head=False, sparse=sparse.layers)],
        wishes.build_progress,
    )
    threads = wishes.threads or remembered_threads(cache_folder, kernels)
    budget, notes = wishes.vram, [*filter(None, [kernels.note]), *_measured(source, gpu)]
    for attempt in range(ATTEMPTS):
        plan = _planned(source, gpu, threads, budget, sparse.wish)
        try:
            loaded = _Sides(source, gpu, plan, kernels, threads, sparse).load()
        except DeviceMemoryError as error:
            if attempt == ATTEMPTS - 1:
                raise GpuUnavailableError(f"{source.name}: {error}") from error
            budget = int(SHARE_LEFT * plan.vram_bytes)
            notes += ["other programs took memory of the GPU meanwhile: less of the model is there"]
            continue
        loaded.notes[:0] = notes
        return loaded
    raise AssertionError("unreachable")


def _measured(source: ModelSource, gpu: Gpu) -> list[str]:
    """Measure what isn't known of the GPU yet; a remark if it has no room for that."""
    try:
        measure_gpu(gpu, user_folder("cache"), sorted({matrix.format for matrix in source.sizes.matrices()}))
    except DeviceMemoryError:
        return ["the GPU has no room to be measured: planned without its speeds"]
    return []


def _planned(
    source: ModelSource, gpu: Gpu, threads: int, vram: int | None, sparse: SparseWish | None
) -> MemoryPlan:
    """The fastest placement within the budgets, at the speeds of this machine."""
    wishes, cache_folder = source.wishes, user_folder("cache")
    formats, nbytes = kernel_formats(source.weights), source.sizes.nbytes
    machine = with_cpu_speeds(unmeasured_machine(threads), cache_folder, formats, nbytes)
    machine = with_gpu(machine, gpu, free_bytes(gpu.index), cache_folder)
    asked = PlanWishes(
        context=source.context,
        kv=wishes.kv,
        vram=vram,
        ram=wishes.ram,
        repack=wishes.repack,
        batch=CHUNK,
        sparse=sparse,
        routing=known_routing(source.file.path, source.sizes)[0],
        changing_experts=True,
        draft=None if wishes.draft == "auto" else draft_sizes(wishes.draft, source.file)[0],
    )
    try:
        plan = plan_memory(source.sizes, machine, asked)
    except PlanError as error:
        plan = _partly_in_file(source, machine, asked, error)
    if plan.head != "gpu":
        raise GpuUnavailableError(f"{source.name}: {plan.why_not or 'no part is faster on the GPU'}")
    return plan


def _partly_in_file(
    source: ModelSource, machine: Machine, asked: PlanWishes, refusal: PlanError
) -> MemoryPlan:
    """The plan of a model that main memory and the GPU can't hold at any context."""
    largest = largest_context(source.sizes, machine, asked, source.config.trained_context)
    if largest:
        way_out = f"with a context of {largest} it fits (--context, context=)"
        raise OutOfMemoryError(f"{source.name}: {refusal}; {way_out}") from refusal
    try:
        return plan_memory(source.sizes, machine, replace(asked, disk=True, sparse=None))
    except PlanError as error:
        raise GpuUnavailableError(f"{source.name}: {error}") from error


@dataclass(frozen=True)
class _Sides:
    """Both sides of a model that is divided as the plan says."""

    source: ModelSource
    gpu: Gpu
    plan: MemoryPlan
    kernels: Kernels
    threads: int
    sparse: SparseChoice

    def load(self) -> LoadedEngine:
        """Bring everything into place. Raises `DeviceMemoryError`."""
        source, plan, facts = self.source, self.plan, self.source.specification
        placing = Placing(source, plan.file_weight_bytes)
        device = cuda_device(self.gpu.index)
        sparse = self.sparse if plan.wishes.sparse else SparseChoice()
        mailbox = Mailbox(device, CHUNK, facts.width, most_used(facts))
        above = self._on_device(mailbox, placing)
        caches = self._host_caches()
        try:
            host = HostHalf(
                facts,
                source.weights,
                self._divisions,
                caches,
                self.kernels,
                mailbox.addresses,
                batch=CHUNK,
                threads=self.threads,
                computed=host_batch(CHUNK, plan.prediction.send_from),
                in_file=blocks_in_file(plan),
                sparse=sparse.layers,
                on_placed=placing,
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
            stay = above.refill_experts(ExpertSlots(changing[0].experts, used, slots))
        cached = KVCache(source.context, list(caches.values()), self._device_cache_bytes())
        engine = Transformer(
            facts,
            SplitBackend(host, above),
            cached,
            CHUNK,
            plan.weight_bytes_per_token,
            source.context,
            source.file.check_size,
        )
        notes = [placed_note(plan), *known_routing(source.file.path, source.sizes)[1]]
        if sparse.note:
            notes.append(sparse.note)
        if plan.wishes.disk:
            notes.append(prepare_reading(source.file, left_in_file(plan, source.weights), plan))
        if stay:
            notes.append(f"experts stay where they are: {stay}")
        if refused:
            notes.append(
                f"{mebibytes(refused)} of weights in main memory couldn't be pinned: prompts send them by "
                "way of buffers that are, which is slower"
            )
        here = sum(item.bytes for item in plan.items if item.device == "cpu" and item.item != DRAFT)
        return LoadedEngine(engine, lambda: plan, here, on_gpu=True, room=self._draft_room(), notes=notes)

    def _draft_room(self) -> DraftRoom | None:
        """What the plan has kept for a draft."""
        if self.plan.draft != "gpu":
            return None
        kept = sum(item.bytes for item in self.plan.items if item.item in (DRAFT, *SHARED_ITEMS))
        return DraftRoom(self.gpu, kept, kept=True)

    @property
    def _divisions(self) -> tuple[LayerDivision, ...]:
        return tuple(layer.division for layer in self.plan.layers)

    def _host_caches(self) -> dict[int, LayerCache]:
        """Those of the layers whose attention is the CPU's, by layer."""
        source = self.source
        return {
            index: LayerCache.allocate(layer.attention, source.context, source.wishes.kv)
            for index, (layer, division) in enumerate(
                zip(source.specification.layers, self._divisions, strict=True)
            )
            if not division.attention
        }

    def _on_device(self, mailbox: Mailbox, placing: Placing) -> CudaBackend:
        source = self.source
        backend = CudaBackend(
            source.specification,
            source.weights,
            source.context,
            cuda_device(self.gpu.index),
            DeviceOptions(
                kv=source.wishes.kv,
                divisions=self._divisions,
                send_from=self.plan.prediction.send_from,
            ),
            on_placed=placing,
            mailbox=mailbox,
        )
        return made_ready(backend, self.gpu, source, self.plan.weight_bytes_per_token)

    def _device_cache_bytes(self) -> int:
        return sum(
            item.bytes
            for item in self.plan.items
            if item.device == "gpu" and item.item.endswith("keys and values")
        )


def placed_note(plan: MemoryPlan) -> str:
    """What of a divided model is on the GPU, in a sentence."""
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
