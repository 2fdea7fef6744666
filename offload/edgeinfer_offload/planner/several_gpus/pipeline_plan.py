"""Plans a model over several GPUs: consecutive layers on each, so that a token takes the least time."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.stages import UNUSED_HEAD_ROWS, Device
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.layer_placement import LayerPlacement
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlannedItem, PlanOptions, Prediction
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_offload.report.plan_verdict import binary_size

HOP, UNUSED = "hidden states to the next GPU", "rows of an unused head"
MAX_BOUNDARIES = 16
"""Positions at which a part may end that are tried with more than two GPUs."""
_LAYER = re.compile(r"^layer (\d+) ")


@dataclass(frozen=True)
class PipelinePlan(MemoryPlan):
    """The plan of all parts as one. `parts`: the plan of each GPU's layers, which are numbered from 0."""

    parts: tuple[MemoryPlan, ...] = ()


def plan_pipeline(
    sizes: ModelSizes, machine: Machine, options: PlanOptions, vram: Sequence[int | None]
) -> PipelinePlan:
    """The fastest division of the layers among the machine's GPUs in their order, all of which get some.
    `vram`: the budget of each.

    A token passes the GPUs one after another, so that the fastest one gets as many layers as it holds.

    Raises `PlanError`: the GPUs can't hold the model together.
    """
    count, layers = len(machine.gpus), len(sizes.layers)
    if sizes.is_encoder or any(block.reads_other_layers for block in sizes.blocks):
        raise PlanError("its layers can't be on several GPUs: it is an encoder, or layers read other layers")
    if layers < count:
        raise PlanError(f"the model has {layers} layers for {count} GPUs")

    @cache
    def part(gpu: int, first: int, last: int) -> MemoryPlan | PlanError:
        here, own = alone_on(machine, options, gpu, vram[gpu], drafts=last == layers)
        try:
            return plan_part(_part_sizes(sizes, first, last), here, own)
        except PlanError as error:
            return error

    best: tuple[float, tuple[MemoryPlan, ...]] | None = None
    for bounds in _divisions(layers, count):
        parts = [part(gpu, *pair) for gpu, pair in enumerate(pairwise(bounds))]
        plans = tuple(each for each in parts if isinstance(each, MemoryPlan))
        seconds = sum(plan.prediction.seconds for plan in plans)
        if len(plans) == count and (best is None or seconds < best[0]):
            best = seconds, plans
    if best is None:
        raise _refusal(sizes, [part(gpu, gpu, gpu + 1) for gpu in range(count)])
    return _joined(best[1], machine, options)


def plan_pipeline_with_cpu(
    sizes: ModelSizes, machine: Machine, options: PlanOptions, vram: Sequence[int | None]
) -> PipelinePlan:
    """The GPUs after the first get as many of the last layers as they hold; the first GPU and the CPU share
    the others, as in a split model.

    Raises `PlanError`: that doesn't fit, or the first GPU helps with no layer.
    """
    end, later = len(sizes.layers), list[MemoryPlan]()
    for gpu in range(len(machine.gpus) - 1, 0, -1):
        here, own = alone_on(machine, options, gpu, vram[gpu], drafts=end == len(sizes.layers))
        first, plan = _most_layers(sizes, here, own, end, least=gpu)
        later.insert(0, plan)
        end = first
    here, _ = alone_on(machine, options, 0, vram[0], drafts=False)
    split = replace(options, device="any", vram=vram[0], expert_cache=False, draft=None)
    plan = plan_memory(_part_sizes(sizes, 0, end), here, split)
    if plan.head != "gpu":
        raise PlanError(plan.limit_reason or "no layer is faster on the first GPU")
    return _joined([plan, *later], machine, options)


def alone_on(
    machine: Machine, options: PlanOptions, gpu: int, vram: int | None, *, drafts: bool
) -> tuple[Machine, PlanOptions]:
    """The machine with one of its GPUs, and the options of a part that is wholly there; `drafts`: with the
    draft model or head, if there is one.
    """
    draft = options.draft if drafts else None
    own = replace(options, device="gpu", vram=vram, expert_cache=False, repack=True, draft=draft)
    return replace(machine, gpus=(machine.gpus[gpu],)), own


def plan_part(sizes: ModelSizes, machine: Machine, options: PlanOptions) -> MemoryPlan:
    """The plan of a part that is wholly on a GPU, with a draft head if there is one. Raises `PlanError`."""
    plan = plan_memory(sizes, machine, options)
    if options.draft is not None and options.draft.is_draft_head and not plan.has_gpu_head:
        raise PlanError("the draft head doesn't fit next to its part of the model")
    return plan


def _most_layers(
    sizes: ModelSizes, machine: Machine, options: PlanOptions, end: int, least: int
) -> tuple[int, MemoryPlan]:
    """The longest run of layers up to `end` that a GPU holds, after the first `least` ones: its begin and its
    plan. Raises `PlanError`: not one layer fits.
    """
    fitting: tuple[int, MemoryPlan] | None = None
    failure: PlanError | None = None
    low, high = least, end - 1
    while low <= high:
        first = (low + high) // 2
        try:
            fitting = first, plan_part(_part_sizes(sizes, first, end), machine, options)
            high = first - 1
        except PlanError as error:
            failure, low = error, first + 1
    if fitting is None:
        raise failure or PlanError("there are more GPUs than layers")
    return fitting


def layer_counts(plan: PipelinePlan) -> list[int]:
    """The number of layers of each part."""
    return [len(part.layers) for part in plan.parts]


def _divisions(layers: int, count: int) -> Iterator[tuple[int, ...]]:
    """The bounds of `count` consecutive parts, at least one layer each: 0, …, `layers`."""
    step = 1 if count == 2 else max(1, layers // MAX_BOUNDARIES)

    def following(first: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 1:
            yield (layers,)
            return
        for bound in range(first + step, layers - left + 2, step):
            for others in following(bound, left - 1):
                yield bound, *others

    for bounds in following(0, count):
        yield 0, *bounds


def _part_sizes(sizes: ModelSizes, first: int, last: int) -> ModelSizes:
    """As `layer_parts`: the first part has the embedding, the last one the head."""
    part = replace(sizes, layers=sizes.layers[first:last], embedding=sizes.table if first == 0 else None)
    if last == len(sizes.layers):
        return part
    return replace(part, vocabulary=UNUSED_HEAD_ROWS, head=replace(sizes.head, rows=UNUSED_HEAD_ROWS))


def _joined(parts: Sequence[MemoryPlan], machine: Machine, options: PlanOptions) -> PipelinePlan:
    """The parts' plans as one."""
    items: list[PlannedItem] = []
    layers: list[LayerPlacement] = []
    budgets = {"cpu": parts[0].ram_bytes}
    for gpu, plan in enumerate(parts):
        name = Device("gpu", gpu).name
        is_last = gpu + 1 == len(parts)
        own = [item if is_last or item.item != "head" else replace(item, item=UNUSED) for item in plan.items]
        items += [item_on(item, name, len(layers)) for item in own]
        if not is_last:
            seconds = _hop_seconds(machine, gpu)
            items.append(PlannedItem(HOP, "link", 0, 1000 * seconds, "synchronization"))
        layers += [_layer_on(layer, name) for layer in plan.layers]
        budgets[name] = plan.vram_bytes
    last = Device("gpu", len(parts) - 1).name
    plan = PipelinePlan(
        items=tuple(items),
        layers=tuple(layers),
        head=last,
        embedding=parts[0].embedding,
        draft=last if parts[-1].has_gpu_head else None,
        machine=machine,
        options=replace(options, device=parts[0].options.device),
        budgets=budgets,
        prediction=_prediction(parts, machine),
        parts=tuple(parts),
    )
    return replace(plan, limit_reason=_reason(plan))


def _layer_on(layer: LayerPlacement, gpu: str) -> LayerPlacement:
    """A layer of a part on its GPU; what the CPU has of it stays there."""
    names = {"gpu": gpu}
    return replace(
        layer,
        attention=names.get(layer.attention, layer.attention),
        kv_cache=names.get(layer.kv_cache, layer.kv_cache),
        granules_gpu=gpu,
    )


def item_on(item: PlannedItem, device: str, first: int) -> PlannedItem:
    """An item of a part on its GPU, with the number of its layer in the whole model, whose first one there is
    `first`.
    """
    item = replace(item, device=device if item.device == "gpu" else item.device)
    if item.layer is None:
        return item
    number = item.layer + first
    return replace(item, layer=number, item=_LAYER.sub(f"layer {number} ", item.item))


def _hop_seconds(machine: Machine, gpu: int) -> float:
    """Seconds between the last kernel of a GPU and the first one of the next: a copy to main memory for
    which the host waits, and the next GPU's reading. Measured together as a synchronization of the link.
    """
    return machine.gpus[gpu].link.sync_seconds + machine.gpus[gpu + 1].link.sync_seconds


def _prediction(parts: Sequence[MemoryPlan], machine: Machine) -> Prediction:
    """A token takes the sum of the parts, and the hops between them."""
    each = [plan.prediction for plan in parts]
    hops = sum(_hop_seconds(machine, gpu) for gpu in range(len(parts) - 1))
    return Prediction(
        seconds_empty=sum(one.seconds_empty for one in each) + hops,
        seconds=sum(one.seconds for one in each) + hops,
        seconds_full=sum(one.seconds_full for one in each) + hops,
        prompt=each[0].prompt,
        prompt_seconds=sum(one.prompt_seconds for one in each) + hops,
        stream_min_tokens=each[0].stream_min_tokens,
    )


def _reason(plan: PipelinePlan) -> str:
    """Which GPU has which layers, and why."""
    first, texts = 0, []
    for gpu, part in zip(plan.machine.gpus, plan.parts, strict=True):
        last = first + len(part.layers) - 1
        shared = " and the CPU" if len(part.devices) > 1 else ""
        texts.append(f"layers {first}-{last} on {gpu.name} (cuda:{gpu.index}){shared}")
        first = last + 1
    return (
        f"{', '.join(texts)}: one after another, because no GPU alone holds the model; a token takes the sum "
        "of their times"
    )


def _refusal(sizes: ModelSizes, single_layers: Sequence[MemoryPlan | PlanError]) -> PlanError:
    """Why there is no pipeline: one of the GPUs can't hold a single layer, or the layers, the head and the
    caches need more than all GPUs have.
    """
    broken = next((error for error in single_layers if isinstance(error, PlanError)), None)
    if broken is not None:
        return broken
    budgets = [plan.vram_bytes for plan in single_layers if isinstance(plan, MemoryPlan)]
    return PlanError(
        f"the model's weights have {binary_size(sizes.nbytes)}, and with caches and buffers they don't fit "
        f"{len(budgets)} GPUs of which {' + '.join(map(binary_size, budgets))} may be used"
    )
