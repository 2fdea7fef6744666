"""The memory planner: the placement of all bytes of a model that decodes fastest within the budgets.

`plan_memory` is a pure function of sizes, a machine and options: it needs no file, no GPU and no engine.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.cost_constants import MAX_EXPERT_CACHE_SLOWDOWN
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.disk_offload import offloaded
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError, refuse
from edgeinfer_offload.planner.placement_problem import PlacementProblem
from edgeinfer_offload.planner.placement_search import CPU, GPU, Placement
from edgeinfer_offload.planner.plan_items import DEVICES, placement_items
from edgeinfer_offload.planner.plan_types import PlannedItem, PlanOptions, Prediction
from edgeinfer_offload.planner.prompt_speed import PromptSpeed
from edgeinfer_offload.report.plan_verdict import binary_size

MIN_CONTEXT = 256
"""The context isn't shortened below this number of tokens."""
NO_EXPERT_CACHE = "there is no expert cache: main memory can't hold the GPU's experts as well"


def plan_memory(sizes: ModelSizes, machine: Machine, options: PlanOptions) -> MemoryPlan:
    """The fastest placement within the budgets. If none fits, the constraints that `options` allows are
    relaxed one by one and listed in the plan's `relaxations`.

    Raises:
        PlanError: nothing fits, or the single requested device can't hold it.
    """
    sizes = sizes.with_whole_caches() if options.whole_caches else sizes
    plan, placement = _with_relaxations(sizes, machine, replace(options, expert_cache=False))
    if not options.expert_cache:
        return plan
    if not plan.options.disk:
        return _with_expert_cache(sizes, plan, placement)
    some = any(layer.has_some_experts for layer in plan.layers)
    return replace(plan, relaxations=(NO_EXPERT_CACHE, *plan.relaxations)) if some else plan


def _with_relaxations(
    sizes: ModelSizes, machine: Machine, options: PlanOptions
) -> tuple[MemoryPlan, Placement]:
    """The plan with as few relaxations as possible. Raises `PlanError`."""
    first: PlanError | None = None
    for relaxed, relaxations in _relaxed(options):
        try:
            problem = PlacementProblem(sizes, machine, relaxed)
            placement = _placement(problem)
            return replace(_plan_of(problem, placement), relaxations=relaxations), placement
        except PlanError as error:
            first = first or error
    assert first is not None
    raise first


def _with_expert_cache(sizes: ModelSizes, plan: MemoryPlan, placement: Placement) -> MemoryPlan:
    """The plan; or one with an expert cache: the same number of experts on the GPU in each layer, and all in
    main memory. The latter needs enough memory and nearly the same speed at uniform routing.
    """
    problem = PlacementProblem(sizes, plan.machine, replace(plan.options, expert_cache=True))
    spread = problem.spread(placement, problem.vram)
    if spread is None:
        return plan
    try:
        cached = replace(_plan_of(problem, spread), relaxations=plan.relaxations)
    except PlanError:
        return replace(plan, relaxations=(NO_EXPERT_CACHE, *plan.relaxations))
    is_slower = cached.prediction.seconds > MAX_EXPERT_CACHE_SLOWDOWN * plan.prediction.seconds
    return plan if is_slower else cached


def _relaxed(options: PlanOptions) -> Iterator[tuple[PlanOptions, tuple[str, ...]]]:
    """The options, then each allowed relaxation in order, on top of the previous ones."""
    relaxations: tuple[str, ...] = ()
    disk, options = options.disk, replace(options, disk=False)
    yield options, relaxations
    if options.kv_may_shrink and options.kv == "f16" and options.device != "cpu":
        options = replace(options, kv="q8_0")
        relaxations = ("keys and values are q8_0 instead of f16",)
        yield options, relaxations
    context, kept = options.context, relaxations
    while options.min_context and context > options.min_context:
        context = max(context * 3 // 4 // 256 * 256, options.min_context)
        relaxations = (*kept, f"the context is {context}, not {options.context}")
        yield replace(options, context=context), relaxations
    if disk:
        yield replace(options, context=context, disk=True), relaxations


def largest_context(sizes: ModelSizes, machine: Machine, options: PlanOptions, trained: int) -> int:
    """Maximum context in tokens for which the model fits the device of `options`, at most `trained`; 0: none.
    For "any" the device is main memory. If that is too small, GPU and main memory together, with the
    requested context shortened in quarters.
    """
    if options.device == "any":
        here = largest_context(sizes, machine, replace(options, device="cpu"), trained)
        return here or _split_context(sizes, machine, options)
    device_index = GPU if options.device == "gpu" else CPU
    sizes = sizes.with_whole_caches() if options.whole_caches else sizes
    problem = PlacementProblem(sizes, machine, options)
    if device_index == GPU and not problem.can_be_whole:
        return 0
    fixed = sum(item.bytes for item in _refusable(problem, device_index)) - problem.buffers.context_bytes(
        device_index, options.context
    )
    room = (problem.vram if device_index == GPU else problem.ram) - fixed
    return bisect_right(
        range(1, trained + 1), room, key=lambda context: problem.buffers.context_bytes(device_index, context)
    )


def _split_context(sizes: ModelSizes, machine: Machine, options: PlanOptions) -> int:
    """As `largest_context`; a model that doesn't fit at the minimum context doesn't fit at any."""
    kept = replace(options, disk=False, expert_cache=False)
    try:
        plan_memory(sizes, machine, replace(kept, context=min(MIN_CONTEXT, options.context)))
        return plan_memory(sizes, machine, replace(kept, min_context=MIN_CONTEXT)).options.context
    except PlanError:
        return 0


def _refusal(problem: PlacementProblem, device_index: int) -> PlanError:
    """The error if not everything fits one device: that device is full, or the main memory it needs."""
    items, allowed = _refusable(problem, device_index), problem.vram if device_index == GPU else problem.ram
    if device_index == GPU and sum(item.bytes for item in items) <= allowed:
        items, allowed = _placed_items(problem, device_index, CPU), problem.ram
        device_index = CPU
    return refuse(DEVICES[device_index], sum(item.bytes for item in items), allowed, items)


def _refusable(problem: PlacementProblem, device_index: int) -> list[PlannedItem]:
    """The items that the device would have to hold."""
    return _placed_items(problem, device_index, device_index)


def _placed_items(problem: PlacementProblem, whole: int, device_index: int) -> list[PlannedItem]:
    """The items that device `device_index` holds if everything runs on device `whole`."""
    placement = problem.whole(whole)
    items = placement_items(problem, placement, PromptSpeed(problem, placement)).items
    return [item for item in items if item.device == DEVICES[device_index]]


def _placement(problem: PlacementProblem) -> Placement:
    """The fastest placement. Raises `PlanError`."""
    device_index = GPU if problem.options.device == "gpu" else CPU
    if device_index == GPU and not problem.can_be_whole:
        raise PlanError(problem.refusal or "the GPU has no kernels for one of the layers")
    placement = problem.best(problem.vram)
    if placement is None:
        raise _refusal(problem, device_index)
    return placement


def _plan_of(problem: PlacementProblem, placement: Placement) -> MemoryPlan:
    speed, non_layer = PromptSpeed(problem, placement), placement.non_layer
    placed = placement_items(problem, placement, speed)
    items, layers, waiting = offloaded(placed, problem)
    on_cpu = [item for item in items if item.device == "cpu"]
    if sum(item.bytes for item in on_cpu) > problem.ram:
        raise refuse("cpu", sum(item.bytes for item in on_cpu), problem.ram, on_cpu)
    return MemoryPlan(
        items=tuple(items),
        layers=tuple(layers),
        head=next(item.device for item in items if item.item == "head"),
        embedding="gpu" if non_layer.embedding == GPU else "disk",
        draft=None if non_layer.draft is None else DEVICES[non_layer.draft],
        machine=problem.machine,
        options=problem.options,
        budgets={"gpu": problem.vram, "cpu": problem.ram},
        prediction=_prediction(problem, placement, items, speed, waiting),
        limit_reason=_limit_reason(problem, placement, items),
    )


def _prediction(
    problem: PlacementProblem,
    placement: Placement,
    items: Sequence[PlannedItem],
    speed: PromptSpeed,
    waiting: float,
) -> Prediction:
    """The prediction for baseline decoding, without the gain of drafting."""
    options, is_encoder = problem.options, problem.sizes.is_encoder
    dry = 0.0 if is_encoder else sum(item.ms_per_token for item in items if not item.overlapped) / 1000

    def at(depth: int) -> float:
        change = 0.0
        for layer, devices in zip(problem.sizes.layers, placement.layers, strict=True):
            cost = problem.pricing.state_on_gpu if devices.attention == GPU else problem.pricing.state_on_cpu
            now, then = cost(layer), cost(layer, depth)
            if now and then and not is_encoder:
                change += then.seconds - now.seconds
        return dry + change

    prompt = min(options.prompt, options.context)
    if is_encoder:
        prompt = options.chunk if placement.non_layer.head == GPU else options.batch
    return Prediction(
        seconds_empty=at(0),
        seconds=dry,
        seconds_full=at(options.context),
        prompt=prompt,
        prompt_seconds=speed.seconds(prompt, options.chunk, options.batch) + waiting,
        stream_min_tokens=speed.stream_min_tokens,
    )


def _limit_reason(
    problem: PlacementProblem, placement: Placement, items: Sequence[PlannedItem]
) -> str | None:
    """Why the next part isn't on the GPU."""
    if problem.refusal and problem.options.device == "any":
        return f"nothing is on a GPU: {problem.refusal}"
    if problem.pricing.graphics is None or not problem.works_on_cpu(placement):
        return None
    taken = sum(item.bytes for item in items if item.device == "gpu")
    free = problem.vram - (taken or problem.buffers.min_gpu_bytes)
    if free < 0:
        return (
            "nothing is on the GPU: its buffers and libraries alone take "
            f"{binary_size(problem.buffers.min_gpu_bytes)}, {binary_size(problem.vram)} may be used"
        )
    room = f"{binary_size(free)} are left of {binary_size(problem.vram)}"
    if problem.attends_together and not taken and problem.attending_bytes > free:
        together = binary_size(problem.attending_bytes)
        return (
            f"nothing is on the GPU: all attention, its caches and the head together take {together}; {room}"
        )
    if any(devices.granules for devices in placement.layers) and problem.options.expert_cache:
        return f"{_expert_cache_text(problem, placement)}; {room}"
    split = {item.layer for item in items if item.layer is not None and " of " in item.item}
    waiting = [i for i in items if i.device != "gpu" and i.bytes and i.ms_per_token and i.layer not in split]
    if not waiting:
        return f"{binary_size(free)} of the GPU are left: with more on it, tokens would take longer"
    following = max(waiting, key=lambda item: item.ms_per_token / item.bytes)
    if following.bytes > free:
        return f"next on the GPU would be {following.item} with {binary_size(following.bytes)}; {room}"
    return f"{following.item} would fit the GPU ({room}), but tokens would not be faster"


def _expert_cache_text(problem: PlacementProblem, placement: Placement) -> str:
    """The sentence about the expert cache: what one more expert in each layer takes."""
    taken = [
        float(cost.gpu_bytes[devices.granules]) / devices.granules
        for cost, devices in zip(problem.costs, placement.layers, strict=True)
        if devices.granules
    ]
    return (
        "the GPU's experts change while decoding, so tokens that share experts are faster; one more "
        f"in each layer takes {binary_size(sum(taken))}"
    )
