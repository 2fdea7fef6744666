"""The placement problem of one model on one machine with one set of options: costs and the best placement."""

from dataclasses import replace
from functools import cached_property

from edgeinfer_kernels.caches.cache_types import is_for_cpu
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.sizes import cuda_buffers, cuda_matrices
from edgeinfer_kernels.sizes.cpu_workspace import observed_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.cost_constants import (
    DRAFT_READS,
    DRAFT_WEIGHT,
    KEPT_PAGES_SHARE,
    MAPPED_DISK_SHARE,
    MAPPED_SLOWDOWN,
    MAX_PREFILL_SLOWDOWN,
    SPLIT_TOKEN_SECONDS,
)
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.buffer_sizes import BufferSizes
from edgeinfer_offload.planner.layer_costs import Cost, Pricing, layer_costs
from edgeinfer_offload.planner.layer_placement import DeviceName
from edgeinfer_offload.planner.placement_search import (
    CPU,
    GPU,
    Budget,
    LayerDevices,
    NonLayerPlacement,
    Placement,
    Search,
)
from edgeinfer_offload.planner.plan_types import CPU_BATCH, PlanOptions
from edgeinfer_offload.planner.sparse_types import SparseOptions


class PlacementProblem:
    """One model on one machine with one set of options."""

    def __init__(self, sizes: ModelSizes, machine: Machine, options: PlanOptions) -> None:
        self.sizes, self.machine, self.options = sizes, machine, options
        self.refusal = self._gpu_refusal()
        self.pricing = Pricing(machine, options, use_gpu=self.refusal is None)
        self.sparse = options.sparse or SparseOptions({}, 0, 0)
        self.buffers = BufferSizes(sizes, machine, options, self.pricing, self.sparse)
        self.costs = layer_costs(sizes.layers, self.pricing, options.routing, self.sparse)
        free = machine.graphics.free_bytes if self.pricing.graphics and machine.graphics else 0
        self.vram = free if options.vram is None else min(free, options.vram)
        ram = machine.processor.free_bytes
        self.ram = ram if options.ram is None else min(ram, options.ram)

    def _gpu_refusal(self) -> str | None:
        """Why nothing can be on the GPU; None: the GPU can be used."""
        if self.options.device == "cpu":
            return "only the CPU was requested"
        if self.machine.graphics is None:
            return "there is no GPU"
        if is_for_cpu(self.options.kv):
            return f"keys and values in {self.options.kv} run on the CPU only"
        if not self.options.repack:
            return "the weights stay memory-mapped"
        if self.options.lora is not None and (refusal := self.options.lora.gpu_refusal):
            return refusal
        try:
            self.sizes.head_device_bytes()
            cuda_matrices.matrix_bytes(self.sizes.table)
            cuda_buffers.workspace_bytes(
                self.sizes, self.options.context, self.options.chunk, self.options.kv
            )
            for layer in self.sizes.layers:
                for block in layer.undivided:
                    block.undivided_device_bytes()
        except UnsupportedOnDeviceError as error:
            return str(error)
        return None

    @cached_property
    def head(self) -> tuple[Cost, Cost | None]:
        head = [self.sizes.head]
        on_gpu = self.pricing.on_gpu(head, self.sizes.head_device_bytes, 1)
        on_cpu = self.pricing.on_cpu(head)
        return (replace(on_cpu, nbytes=0) if self.sizes.shares_head else on_cpu), on_gpu

    @cached_property
    def embedding_gpu_bytes(self) -> int:
        embedding = self.sizes.embedding
        if embedding is None or self.sizes.shares_embedding:
            return 0
        return cuda_matrices.matrix_bytes(embedding)

    @cached_property
    def draft(self) -> tuple[Cost, Cost | None] | None:
        """Cost of the whole draft model, or of all draft heads, on either device, with cache and buffers;
        seconds per accepted token.
        """
        draft = self.options.draft
        if draft is None:
            return None
        here, there = self._cost_of_draft(draft)
        kept = cuda_buffers.kept_state_bytes(draft)
        for head in draft.further_heads:
            more, also = self._cost_of_draft(head)
            here = replace(here, nbytes=here.nbytes + more.nbytes)
            if there and also:  # All heads read the same states.
                there = replace(there, nbytes=there.nbytes + also.nbytes - kept)
        return here, there

    def _cost_of_draft(self, draft: ModelSizes) -> tuple[Cost, Cost | None]:
        options = self.options
        sequences = draft.sequences_of_draft(options.context, options.sequences)
        alone = replace(
            options, draft=None, sparse=None, lora=None, vram=None, ram=None, routing=None, device="any",
            batch=draft.draft_batch if draft.is_draft_head else CPU_BATCH, sequences=sequences,
        )  # fmt: skip
        problem = PlacementProblem(draft, self.machine, alone)

        def on(device_index: int, workspace: int) -> Cost:
            whole = problem.whole(device_index)
            nbytes = int(whole.gpu_bytes + whole.cpu_bytes) + workspace
            if device_index == CPU and not options.repack:  # its weights stay memory-mapped
                nbytes = problem.buffers.context_bytes(CPU, options.context) + workspace
            return Cost(nbytes, DRAFT_READS * whole.seconds, DRAFT_READS * whole.seconds)

        kept = cuda_buffers.kept_state_bytes(draft) if draft.is_draft_head else 0
        there = on(GPU, problem.buffers.gpu_workspace + kept) if problem.can_be_whole else None
        observed = observed_bytes(draft, options.batch)
        return on(CPU, problem.buffers.cpu_workspace + observed), there

    def non_layer(self, head: int, embedding: int, draft: int | None) -> NonLayerPlacement:
        costs = [(head, self.head[head])]
        if draft is not None and self.draft:
            cost = self.draft[draft]
            costs.append((draft, cost and replace(cost, seconds=DRAFT_WEIGHT * cost.seconds)))
        placed = [(device_index, cost) for device_index, cost in costs if cost]
        taken = {
            device_index: sum(cost.nbytes for at, cost in placed if at == device_index)
            for device_index in (CPU, GPU)
        }
        return NonLayerPlacement(
            head=head,
            embedding=embedding,
            draft=draft,
            seconds=sum(cost.seconds for _, cost in placed),
            gpu_bytes=taken[GPU] + (self.embedding_gpu_bytes if embedding == GPU else 0),
            cpu_bytes=taken[CPU],
        )

    @cached_property
    def search(self) -> Search:
        return Search(self.costs, self._non_layer_placements(), self.pricing.sync_seconds)

    def _best_split(self, vram: float) -> Placement | None:
        """The fastest placement on both devices, or an about equally fast one with all attention on the GPU,
        to which prefill can stream the feed-forwards. If layers read results of others, all attention is on
        the GPU. None: there is no such placement.
        """
        if self.attends_together:
            return self._best_attending(vram) if self.can_attend else None
        best = self.search.best(self._budget(vram))
        if best is None or not self.buffers.streams or not self.can_be_whole:
            return best
        attending = self._best_attending(vram)
        return attending if attending and attending.seconds <= MAX_PREFILL_SLOWDOWN * best.seconds else best

    @property
    def attends_together(self) -> bool:
        """Whether all attention has to be on one device, as a draft head may need the states between layers
        there.
        """
        draft = self.options.draft
        reads_states = draft is not None and draft.reads_between(len(self.sizes.layers))
        return reads_states or any(block.reads_other_layers for block in self.sizes.blocks)

    @property
    def attending_bytes(self) -> float:
        """GPU bytes of all attention, its caches and the head, without buffers."""
        layers = [LayerDevices(GPU) for _ in self.costs]
        return self.search.placement(layers, self.non_layer(GPU, CPU, CPU if self.draft else None)).gpu_bytes

    def _best_attending(self, vram: float) -> Placement | None:
        """The fastest placement with all attention on the GPU."""
        return self.search.best(self._budget(vram, host_attends=False), attend=True)

    def _non_layer_placements(self) -> list[NonLayerPlacement]:
        drafts: list[int | None] = [CPU] if self.draft else [None]
        if self.draft and self.draft[GPU]:
            drafts.append(GPU)
        if self.pricing.graphics is None:
            return [self.non_layer(CPU, CPU, drafts[0])]
        if self._has_draft_head:  # It reads the states of the last layer there.
            drafts = drafts[1:]
        return [self.non_layer(GPU, CPU, draft) for draft in drafts]

    def whole(self, device_index: int, draft: int | None = None) -> Placement:
        """Everything on one device. `draft`: the device of the draft model; None: the same one if
        possible.
        """
        if draft is None:
            draft = device_index if self.draft and self.draft[device_index] else CPU
        draft = draft if self.draft else None
        layers = [
            LayerDevices(device_index, cost.granules if device_index == GPU else 0) for cost in self.costs
        ]
        placement = self.search.placement(layers, self.non_layer(device_index, device_index, draft))
        return replace(placement, seconds=placement.seconds + self.host_seconds(placement))

    def _with_per_layer_table(self, placement: Placement) -> Placement:
        """The placement with the table of per-layer embeddings on the GPU, if there is one that kernels
        read.
        """
        nbytes, non_layer = cuda_matrices.table_bytes(self.sizes.per_layer), placement.non_layer
        if not nbytes:
            return placement
        non_layer = replace(non_layer, per_layer_on_gpu=True, gpu_bytes=non_layer.gpu_bytes + nbytes)
        return replace(placement, non_layer=non_layer, gpu_bytes=placement.gpu_bytes + nbytes)

    def _draft_only(self) -> Placement | None:
        """Only the draft model on the GPU; None: there is no draft model, or it doesn't fit."""
        if not self.draft or not self.draft[GPU] or self._has_draft_head:
            return None
        budget, here = self._budget(self.vram), [LayerDevices(CPU) for _ in self.costs]
        placement = self.search.placement(here, self.non_layer(CPU, CPU, GPU))
        if placement.gpu_bytes + budget.gpu_fixed > budget.gpu_bytes:
            return None
        return replace(placement, seconds=placement.seconds + budget.penalty(placement.cpu_bytes))

    @property
    def _has_draft_head(self) -> bool:
        return self.options.draft is not None and self.options.draft.is_draft_head

    def streamed_bytes(self, placement: Placement) -> int:
        """GPU bytes used for streaming weights."""
        attends = any(layer.attention == CPU for layer in placement.layers)
        return self.buffers.streamed_bytes(attends) if self.works_on_cpu(placement) else 0

    def _budget(self, vram: float, *, shared: bool = True, host_attends: bool = True) -> Budget:
        """The budget for placements on the GPU; `shared`: the CPU also runs layers, `host_attends`: with
        attention.
        """
        fixed = self.buffers.gpu_fixed + (self.buffers.streamed_bytes(host_attends) if shared else 0)
        cpu_fixed = self.buffers.staging(shared) + (self.buffers.cpu_workspace if shared else 0)
        return Budget(vram, self._cpu_room, fixed, cpu_fixed, self._disk_seconds_per_byte)

    @property
    def _cpu_room(self) -> float:
        return float(self.ram) if self.options.repack else float("inf")

    @property
    def _disk_seconds_per_byte(self) -> float:
        """Seconds per token for each byte on disk; unused experts of an MoE layer are excluded."""
        if not self.options.disk:
            return float("inf")
        routed = [layer.routed for layer in self.sizes.layers if layer.routed]
        shares = [block.granules_per_token / block.granules for block in routed]
        slower = (MAPPED_SLOWDOWN - 1) / self.machine.processor.bytes_per_second
        return min(shares, default=1.0) * (self.disk_seconds(self.sizes.nbytes, self.ram) + slower)

    def disk_seconds(self, nbytes: float, held: float) -> float:
        """Seconds per token for each of `nbytes` file bytes on disk. 0 if they fit the page cache in addition
        to the `held` bytes of main memory.
        """
        cached, rate = self.machine.processor.free_bytes - held, self.machine.disk.bytes_per_second
        if cached >= nbytes:
            return 0.0
        if not self.options.repack:  # the page cache has all that memory leaves
            return (1 - KEPT_PAGES_SHARE * max(0.0, cached) / nbytes) / rate
        return 1 / (MAPPED_DISK_SHARE * rate)

    def best(self, vram: float) -> Placement | None:
        """The fastest placement within `vram` bytes of GPU memory; None: main memory is too small for all of
        them.

        Among placements of about equal speed, one with everything on the GPU is preferred. Its prefill
        doesn't wait for the CPU, and its next token doesn't wait for the host.
        """
        cpu_only = Budget(0, self._cpu_room, 0, self.buffers.cpu_workspace, self._disk_seconds_per_byte)
        candidates, whole = [], None
        if self.options.device != "gpu":
            here = self.whole(CPU)
            candidates.append(replace(here, seconds=here.seconds + cpu_only.penalty(here.cpu_bytes)))
        if self.pricing.graphics and self.can_be_whole:
            alone = self._budget(vram, shared=False)
            wholes = [self.whole(GPU), *([self.whole(GPU, draft=CPU)] if self.draft else [])]
            wholes = [*map(self._with_per_layer_table, wholes), *wholes]
            there = next((each for each in wholes if each.gpu_bytes + alone.gpu_fixed <= vram), None)
            if there:
                whole = replace(there, seconds=there.seconds + alone.penalty(there.cpu_bytes))
                candidates.append(whole)
        if self.pricing.graphics and self.options.device == "any":
            can_split = not any(block.needs_whole_model for block in self.sizes.blocks)
            best_split = self._best_split(vram) if can_split else None
            split = [p for p in (best_split, self._draft_only()) if p]
            candidates += [replace(p, seconds=p.seconds + self.host_seconds(p)) for p in split]
        best = min(candidates, key=lambda placement: placement.seconds, default=None)
        if best and whole and whole.seconds <= MAX_PREFILL_SLOWDOWN * best.seconds:
            best = whole
        return best if best and best.seconds < float("inf") else None

    def spread(self, placement: Placement, vram: float) -> Placement | None:
        """The placement within `vram` bytes with the same number of experts in each layer, for the expert
        cache. None: there are no such layers, or no experts.
        """
        layers = [
            i
            for i, (devices, cost) in enumerate(zip(placement.layers, self.costs, strict=True))
            if devices.attention == GPU and cost.is_moe and cost.granules
        ]
        each = sum(placement.layers[i].granules for i in layers) // max(len(layers), 1)
        if not each or any(each >= self.costs[i].granules for i in layers):
            return None
        budget = self._budget(vram, host_attends=any(c.attention == CPU for c in placement.layers))
        room = vram - budget.gpu_fixed - cuda_buffers.expert_load_bytes(self.sizes)
        for slots in range(each, 0, -1):
            spread = [
                devices._replace(granules=slots) if i in layers else devices
                for i, devices in enumerate(placement.layers)
            ]
            candidate = self.search.placement(spread, placement.non_layer)
            if candidate.gpu_bytes <= room:
                break
        else:
            return None
        waiting = budget.penalty(candidate.cpu_bytes)
        return replace(candidate, seconds=candidate.seconds + waiting + self.host_seconds(candidate))

    @property
    def weights_device(self) -> DeviceName:
        """Where the CPU's weights are stored."""
        return "cpu" if self.options.repack else "disk"

    def host_seconds(self, placement: Placement) -> float:
        """Host seconds per token besides the model's parts."""
        if placement.non_layer.head == CPU:
            return self.machine.processor.token_seconds
        return SPLIT_TOKEN_SECONDS if self.works_on_cpu(placement) else 0.0

    def works_on_cpu(self, placement: Placement) -> bool:
        """Whether the CPU computes any part of a token."""
        return placement.non_layer.head == CPU or any(
            devices.attention == CPU or devices.granules < cost.granules
            for devices, cost in zip(placement.layers, self.costs, strict=True)
        )

    @property
    def can_attend(self) -> bool:
        """Whether the GPU has kernels for the undivided blocks of every layer."""
        if not self.sizes.has_device_kernels:
            return False
        able = (cost.gpu_can_attend and cost.cache[GPU] for cost in self.costs)
        return self.pricing.graphics is not None and all(able)

    @property
    def can_be_whole(self) -> bool:
        """Whether the GPU has kernels for every layer."""
        return self.can_attend and all(cost.granules or not cost.is_divisible for cost in self.costs)
