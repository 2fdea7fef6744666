"""The memory planner: the placement of all bytes of a model that decodes fastest within the budgets.

`plan_memory` is a pure function of sizes, a machine and options: it needs no file, no GPU and no engine.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from edgeinfer_kernels.sizes.cuda_buffers import refill_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.stages import host_batch
from edgeinfer_offload.machine.hardware import OVERLAP_LOSS, Machine
from edgeinfer_offload.planner.disk_offload import spilled
from edgeinfer_offload.planner.layer_costs import Cost
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError, refuse
from edgeinfer_offload.planner.placement_problem import LIBRARY_BYTES, PlacementProblem
from edgeinfer_offload.planner.placement_search import CPU, GPU, Placement
from edgeinfer_offload.planner.plan_items import PLACES, bound_by, hand_over_seconds, placed_layer
from edgeinfer_offload.planner.plan_text import mebibytes
from edgeinfer_offload.planner.plan_types import (
    CUDA_CONTEXT,
    DRAFT,
    LIBRARIES,
    LayerPlacement,
    Place,
    PlannedItem,
    PlanOptions,
    Prediction,
)
from edgeinfer_offload.planner.prompt_speed import PromptSpeed

CHANGING_WORTH = 1.03
"""A plan with an expert cache may be this many times as slow as one without, at uniform routing. The gain at
non-uniform routing isn't known in advance."""
MIN_CONTEXT = 256
"""The context isn't shortened below this number of tokens."""
STAYING = "experts stay where they are: main memory hasn't room for those of the GPU as well"


def plan_memory(sizes: ModelSizes, machine: Machine, wishes: PlanOptions) -> MemoryPlan:
    """The fastest placement within the budgets. If none fits, the constraints that `wishes` allows are
    relaxed one by one and listed in the plan's `steps`.

    Raises:
        PlanError: nothing fits, or the single requested device can't hold it.
    """
    if wishes.changing_experts:
        return _with_changing_experts(sizes, machine, wishes)
    first: PlanError | None = None
    for eased, steps in _eased(wishes):
        try:
            return replace(_plan(PlacementProblem(sizes, machine, eased)), steps=steps)
        except PlanError as error:
            first = first or error
    assert first is not None
    raise first


def _with_changing_experts(sizes: ModelSizes, machine: Machine, wishes: PlanOptions) -> MemoryPlan:
    """The fastest placement; or one with an expert cache: the same number of experts on the GPU in each
    layer, and all in main memory. The latter needs enough memory and nearly the same speed at uniform
    routing.
    """
    fixed = plan_memory(sizes, machine, replace(wishes, changing_experts=False))
    if fixed.wishes.disk:
        some = any(layer.has_some_experts for layer in fixed.layers)
        return replace(fixed, steps=(STAYING, *fixed.steps)) if some else fixed
    chosen = PlacementProblem(sizes, machine, fixed.wishes).choose(fixed.vram_bytes)
    placing = PlacementProblem(sizes, machine, replace(fixed.wishes, changing_experts=True))
    spread = chosen and placing.spread(chosen, placing.vram)
    if spread is None:
        return fixed
    try:
        changing = replace(_plan_of(placing, spread), steps=fixed.steps)
    except PlanError:
        return replace(fixed, steps=(STAYING, *fixed.steps))
    slower = changing.prediction.seconds > CHANGING_WORTH * fixed.prediction.seconds
    return fixed if slower else changing


def _eased(wishes: PlanOptions) -> Iterator[tuple[PlanOptions, tuple[str, ...]]]:
    """The options, then each allowed relaxation in order, on top of the previous ones."""
    steps: tuple[str, ...] = ()
    disk, wishes = wishes.disk, replace(wishes, disk=False)
    yield wishes, steps
    if wishes.kv_may_shrink and wishes.kv == "f16" and wishes.device != "cpu":
        wishes = replace(wishes, kv="q8_0")
        steps = ("keys and values are q8_0 in place of f16",)
        yield wishes, steps
    context, kept = wishes.context, steps
    while wishes.least_context and context > wishes.least_context:
        context = max(context * 3 // 4 // 256 * 256, wishes.least_context)
        steps = (*kept, f"the context is {context}, not {wishes.context}")
        yield replace(wishes, context=context), steps
    if disk:
        yield replace(wishes, context=context, disk=True), steps


def largest_context(sizes: ModelSizes, machine: Machine, wishes: PlanOptions, trained: int) -> int:
    """Maximum context in tokens for which the model fits the device of `wishes`, at most `trained`; 0: none.
    For "any" the device is main memory. If that is too small, GPU and main memory together, with the
    requested context shortened in quarters.
    """
    if wishes.device == "any":
        here = largest_context(sizes, machine, replace(wishes, device="cpu"), trained)
        return here or _divided_context(sizes, machine, wishes)
    side = GPU if wishes.device == "gpu" else CPU
    placing = PlacementProblem(sizes, machine, wishes)
    if side == GPU and not placing.can_be_whole:
        return 0
    fixed = sum(item.bytes for item in _refusable(placing, side)) - placing.context_bytes(
        side, wishes.context
    )
    room = (placing.vram if side == GPU else placing.ram) - fixed
    return bisect_right(range(1, trained + 1), room, key=lambda context: placing.context_bytes(side, context))


def _divided_context(sizes: ModelSizes, machine: Machine, wishes: PlanOptions) -> int:
    """As `largest_context`; a model that doesn't fit at the minimum context doesn't fit at any."""
    kept = replace(wishes, disk=False, changing_experts=False)
    try:
        plan_memory(sizes, machine, replace(kept, context=min(MIN_CONTEXT, wishes.context)))
        return plan_memory(sizes, machine, replace(kept, least_context=MIN_CONTEXT)).wishes.context
    except PlanError:
        return 0


def _refusal(placing: PlacementProblem, side: int) -> PlanError:
    """The error if not everything fits one device: that device is full, or the main memory it needs."""
    items, allowed = _refusable(placing, side), placing.vram if side == GPU else placing.ram
    if side == GPU and sum(item.bytes for item in items) <= allowed:
        items, allowed = _held(placing, side, CPU), placing.ram
        side = CPU
    return refuse(PLACES[side], sum(item.bytes for item in items), allowed, items)


def _refusable(placing: PlacementProblem, side: int) -> list[PlannedItem]:
    """The items that the device would have to hold."""
    return _held(placing, side, side)


def _held(placing: PlacementProblem, whole: int, side: int) -> list[PlannedItem]:
    """The items that device `side` holds if everything runs on device `whole`."""
    chosen = placing.whole(whole)
    items, _ = _items(placing, chosen, PromptSpeed(placing, chosen))
    return [item for item in items if item.device == PLACES[side]]


def _plan(placing: PlacementProblem) -> MemoryPlan:
    side = GPU if placing.wishes.device == "gpu" else CPU
    if side == GPU and not placing.can_be_whole:
        raise PlanError(placing.refusal or "the GPU has no kernels for one of the layers")
    chosen = placing.choose(placing.vram)
    if chosen is None:
        raise _refusal(placing, side)
    return _plan_of(placing, chosen)


def _plan_of(placing: PlacementProblem, chosen: Placement) -> MemoryPlan:
    speed = PromptSpeed(placing, chosen)
    items, layers = _items(placing, chosen, speed)
    items, layers, waiting = spilled(items, layers, placing)
    here = [item for item in items if item.device == "cpu"]
    if sum(item.bytes for item in here) > placing.ram:
        raise refuse("cpu", sum(item.bytes for item in here), placing.ram, here)
    ends = chosen.ends
    return MemoryPlan(
        items=tuple(items),
        layers=tuple(layers),
        head=_head_place(items),
        embedding="gpu" if ends.embedding == GPU else "disk",
        draft=None if ends.draft is None else PLACES[ends.draft],
        machine=placing.machine,
        wishes=placing.wishes,
        vram_bytes=placing.vram,
        ram_bytes=placing.ram,
        prediction=_prediction(placing, chosen, items, speed, waiting),
        limit_reason=_why_not(placing, chosen, items),
    )


def _head_place(items: Sequence[PlannedItem]) -> Place:
    device = next(item.device for item in items if item.item == "head")
    assert device != "link"
    return device


def _items(
    placing: PlacementProblem, chosen: Placement, speed: PromptSpeed
) -> tuple[list[PlannedItem], list[LayerPlacement]]:
    """All items of a placement, before disk offload."""
    items: list[PlannedItem] = []
    layers = []
    routing = placing.wishes.routing
    sparse = placing.wishes.sparse.layers if placing.wishes.sparse else {}
    for index, (layer, costs, choice) in enumerate(
        zip(placing.sizes.layers, placing.costs, chosen.layers, strict=True)
    ):
        chances = routing[index] if routing and layer.routed else None
        by_neuron = sparse.get(index)
        changing = placing.wishes.changing_experts
        placed = placed_layer(
            index, layer, costs, choice, chances, by_neuron, placing.weights_place, changing
        )
        items += placed.items
        layers.append(placed.placement)
    overlapped = [item for item in items if item.overlapped]
    return items + _around_the_layers(placing, chosen, speed, overlapped), layers


def _around_the_layers(
    placing: PlacementProblem, chosen: Placement, speed: PromptSpeed, overlapped: Sequence[PlannedItem]
) -> list[PlannedItem]:
    ends, sizes = chosen.ends, placing.sizes
    items = []

    def add(name: str, place: Place, side: int, cost: Cost | None) -> None:
        if cost:
            ms, bound, draft = 1000 * cost.seconds, bound_by(side, cost), name == DRAFT
            read = cost.nbytes if name == "head" else 0
            items.append(
                PlannedItem(name, place, cost.nbytes, ms, bound, overlapped=draft, weights_read=read)
            )

    def fixed(name: str, place: Place, nbytes: int) -> None:
        if nbytes:
            items.append(PlannedItem(name, place, nbytes, 0.0))

    add("head", "gpu" if ends.head == GPU else placing.weights_place, ends.head, placing.head[ends.head])
    if sizes.embedding:
        on_gpu = ends.embedding == GPU
        nbytes = placing.embedding_gpu_bytes if on_gpu else sizes.embedding.nbytes
        fixed("embedding", "gpu" if on_gpu else "disk", nbytes)
    if ends.draft is not None and placing.draft:
        add(DRAFT, PLACES[ends.draft], ends.draft, placing.draft[ends.draft])
    if placing.works_on_cpu(chosen):
        fixed("workspace", "cpu", placing.cpu_workspace_for(_cpu_batch(placing, chosen, speed)))
    if not chosen.uses_gpu:
        between = 1000 * placing.host_seconds(chosen)
        return [*items, PlannedItem("between tokens", "cpu", 0, between, "CPU latency")] if between else items
    fixed("workspace", "gpu", placing.gpu_workspace)
    fixed(LIBRARIES, "gpu", LIBRARY_BYTES)
    fixed(CUDA_CONTEXT, "gpu", placing.driver_bytes)
    fixed("weights that a prompt sends", "gpu", placing.sent_bytes(chosen))
    if placing.wishes.changing_experts:
        fixed("experts on their way", "gpu", refill_bytes(sizes))
    fixed("staging for the GPU", "cpu", placing.staging(placing.works_on_cpu(chosen)))
    crossing = hand_over_seconds(placing.costs, chosen, placing.pricing.hand_over)
    if crossing:
        items.append(PlannedItem("hand-over", "link", 0, 1000 * crossing, "hand-over"))
    waiting = OVERLAP_LOSS * sum(item.ms_per_token for item in overlapped)
    if waiting:
        items.append(PlannedItem("halves that wait", "link", 0, waiting, "hand-over"))
    to_host = 1000 * placing.host_seconds(chosen)
    items.append(PlannedItem("token to the host", "link", 0, to_host, "hand-over"))
    return items


def _cpu_batch(placing: PlacementProblem, chosen: Placement, speed: PromptSpeed) -> int:
    """Maximum tokens per step on the CPU: longer steps stream its weights to the GPU."""
    stream_min_tokens = speed.stream_min_tokens if chosen.ends.head == GPU else None
    return host_batch(placing.wishes.batch, stream_min_tokens)


def _prediction(
    placing: PlacementProblem,
    chosen: Placement,
    items: Sequence[PlannedItem],
    speed: PromptSpeed,
    waiting: float,
) -> Prediction:
    """The prediction for baseline decoding, without the gain of drafting."""
    dry = sum(item.ms_per_token for item in items if not item.overlapped) / 1000

    def at(depth: int) -> float:
        change = 0.0
        for layer, choice in zip(placing.sizes.layers, chosen.layers, strict=True):
            cost = placing.pricing.state_on_gpu if choice.attention == GPU else placing.pricing.state_on_cpu
            now, then = cost(layer), cost(layer, depth)
            if now and then:
                change += then.seconds - now.seconds
        return dry + change

    wishes = placing.wishes
    prompt = min(wishes.prompt, wishes.context)
    return Prediction(
        seconds_empty=at(0),
        seconds=dry,
        seconds_full=at(wishes.context),
        prompt=prompt,
        prompt_seconds=speed.seconds(prompt, wishes.chunk, wishes.batch) + waiting,
        stream_min_tokens=speed.stream_min_tokens,
    )


def _why_not(placing: PlacementProblem, chosen: Placement, items: Sequence[PlannedItem]) -> str | None:
    """Why the next part isn't on the GPU."""
    if placing.refusal and placing.wishes.device == "any":
        return f"nothing is on a GPU: {placing.refusal}"
    if placing.pricing.graphics is None or not placing.works_on_cpu(chosen):
        return None
    taken = sum(item.bytes for item in items if item.device == "gpu")
    free = placing.vram - (taken or placing.least_gpu_bytes)
    if free < 0:
        return (
            "nothing is on the GPU: its buffers and libraries alone take "
            f"{mebibytes(placing.least_gpu_bytes)}, {mebibytes(placing.vram)} may be used"
        )
    if any(choice.units for choice in chosen.layers) and placing.wishes.changing_experts:
        return f"{_slots_told(placing, chosen)}; {mebibytes(free)} are left of {mebibytes(placing.vram)}"
    split = {item.layer for item in items if item.layer is not None and " of " in item.item}
    waiting = [i for i in items if i.device != "gpu" and i.bytes and i.ms_per_token and i.layer not in split]
    if not waiting:
        return f"{mebibytes(free)} of the GPU are left: with more on it than now the CPU would wait for it"
    following = max(waiting, key=lambda item: item.ms_per_token / item.bytes)
    room = f"{mebibytes(free)} are left of {mebibytes(placing.vram)}"
    if following.bytes > free:
        return f"next on the GPU would be {following.item} with {mebibytes(following.bytes)}; {room}"
    return f"{following.item} would fit the GPU ({room}), where a token would come no sooner for it"


def _slots_told(placing: PlacementProblem, chosen: Placement) -> str:
    """The sentence about the expert cache: what one more expert in each layer takes."""
    taken = [
        float(cost.gpu_bytes[choice.units]) / choice.units
        for cost, choice in zip(placing.costs, chosen.layers, strict=True)
        if choice.units
    ]
    return (
        "experts change places as they are asked for: tokens that agree on some are faster; one more "
        f"in each layer takes {mebibytes(sum(taken))}"
    )
