"""Plans tensor parallel: a part of every layer on each GPU, so that all read weights at the same time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.sizes.tensor_sizes import exchange_bytes, tensor_sizes
from edgeinfer_kernels.stages import Device
from edgeinfer_kernels.tensor_parts import TensorSplitError
from edgeinfer_offload.machine.cost_constants import RANK_BYTES
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.layer_placement import LayerPlacement
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlannedItem, PlanOptions, Prediction
from edgeinfer_offload.planner.several_gpus.pipeline_plan import alone_on, item_on, plan_part

SUMS, COMMUNICATION = "sums over the GPUs", "process and communication"
SUMS_PER_LAYER = 2
"""After attention and after the feed-forward, each with a kernel for the norm, which follows a sum."""
EIGHTHS = range(1, 8)
"""Shares of the first of two GPUs that are tried, besides those by speed."""


@dataclass(frozen=True)
class TensorPlan(MemoryPlan):
    """The plan of all ranks as one. `parts`: the plan of each; `shares`: of heads, neurons and experts;
    `draft_rank`: the one whose GPU a draft model shares.
    """

    parts: tuple[MemoryPlan, ...] = ()
    shares: tuple[float, ...] = ()
    draft_rank: int = 0

    @property
    def devices(self) -> tuple[Device, ...]:
        """All GPUs: each computes a part of every layer."""
        return tuple(Device("gpu", index) for index in range(len(self.parts)))


def plan_tensor(
    sizes: ModelSizes, machine: Machine, options: PlanOptions, vram: Sequence[int | None]
) -> TensorPlan:
    """The division of every layer among the machine's GPUs with which a token takes the least time within
    the budgets. `vram`: the budget of each.

    Raises `PlanError`: the layers can't be divided, or the parts don't fit.
    """
    if machine.peers is None:
        raise PlanError("the GPUs can't add up partial sums here: it takes Linux, and torch with NCCL")
    best: TensorPlan | None = None
    failure: PlanError | None = None
    for shares in dict.fromkeys(_shares(machine, vram)):
        try:
            plan = _plan_of(sizes, machine, options, vram, shares)
        except (PlanError, TensorSplitError) as error:
            failure = failure or PlanError(str(error))
            continue
        if best is None or plan.prediction.seconds < best.prediction.seconds:
            best = plan
    if best is None:
        raise failure or PlanError("no division fits")
    return best


def _shares(machine: Machine, vram: Sequence[int | None]) -> Iterator[tuple[float, ...]]:
    """Divisions to try: by speed, equal, by memory, and of two GPUs in eighths."""
    speeds, count = [gpu.bytes_per_second for gpu in machine.gpus], len(machine.gpus)
    memory = _budgets(machine, vram)
    if max(speeds) < float("inf"):
        yield _normalized(speeds)
    yield (1 / count,) * count
    if min(memory) > 0:
        yield _normalized(memory)
    if count == 2:
        yield from ((eighths / 8, 1 - eighths / 8) for eighths in EIGHTHS)


def _budgets(machine: Machine, vram: Sequence[int | None]) -> list[int]:
    """Bytes that may be used on each GPU."""
    return [
        gpu.free_bytes if budget is None else min(gpu.free_bytes, budget)
        for gpu, budget in zip(machine.gpus, vram, strict=True)
    ]


def _normalized(numbers: Sequence[float]) -> tuple[float, ...]:
    total = sum(numbers)
    return tuple(round(number / total, 3) for number in numbers)


def _plan_of(
    sizes: ModelSizes,
    machine: Machine,
    options: PlanOptions,
    vram: Sequence[int | None],
    shares: tuple[float, ...],
) -> TensorPlan:
    parts, draft_rank = [], _draft_rank(machine, vram, shares)
    used = RANK_BYTES + exchange_bytes(sizes, shares, options.chunk)
    for rank, budget in enumerate(vram):
        left = None if budget is None else max(0, budget - used)
        here, own = alone_on(machine, options, rank, left, drafts=rank == draft_rank)
        gpu = here.gpus[0]
        here = here.with_gpu(replace(gpu, free_bytes=max(0, gpu.free_bytes - used)))
        part = plan_part(tensor_sizes(sizes, shares, rank), here, own)
        held = replace(part, budgets={**part.budgets, "gpu": part.vram_bytes + used})
        parts.append(replace(held, items=(*part.items, PlannedItem(COMMUNICATION, "gpu", used, 0.0))))
    return _joined(sizes, parts, machine, options, shares, draft_rank)


def _draft_rank(machine: Machine, vram: Sequence[int | None], shares: Sequence[float]) -> int:
    """The rank that shares its GPU with a draft model: the one with the smallest share for its memory."""
    free = _budgets(machine, vram)
    return min(range(len(shares)), key=lambda rank: shares[rank] / max(1, free[rank]))


def _joined(
    sizes: ModelSizes,
    parts: Sequence[MemoryPlan],
    machine: Machine,
    options: PlanOptions,
    shares: tuple[float, ...],
    draft_rank: int,
) -> TensorPlan:
    """The ranks' plans as one: the slowest one's items take the time, the others are at the same time."""
    assert machine.peers is not None
    slowest = max(range(len(parts)), key=lambda rank: parts[rank].prediction.seconds)
    items: list[PlannedItem] = []
    budgets = {"cpu": parts[0].ram_bytes}
    for rank, part in enumerate(parts):
        name = Device("gpu", rank).name
        moved = (item_on(item, name, 0) for item in part.items)
        items += moved if rank == slowest else (replace(each, overlapped=True) for each in moved)
        budgets[name] = part.vram_bytes
    launch = max(gpu.launch_seconds for gpu in machine.gpus)
    seconds = SUMS_PER_LAYER * len(sizes.layers) * (machine.peers.sum_seconds + launch)
    items.append(PlannedItem(SUMS, "link", 0, 1000 * seconds, "synchronization"))
    draft = parts[draft_rank].draft
    plan = TensorPlan(
        items=tuple(items),
        layers=_layers(parts),
        head="gpu",
        embedding="gpu",
        draft=Device("gpu", draft_rank).name if draft == "gpu" else draft,
        machine=machine,
        options=replace(options, device="gpu"),
        budgets=budgets,
        prediction=_prediction(sizes, parts, machine, seconds),
        parts=tuple(parts),
        shares=shares,
        draft_rank=draft_rank,
    )
    return replace(plan, limit_reason=_reason(plan))


def _layers(parts: Sequence[MemoryPlan]) -> tuple[LayerPlacement, ...]:
    """Each layer with the neurons and experts of all ranks."""
    joined = []
    for of_ranks in zip(*(part.layers for part in parts), strict=True):
        neurons = sum(layer.neurons for layer in of_ranks)
        experts = sum(layer.experts for layer in of_ranks)
        joined.append(
            replace(
                of_ranks[0],
                hot_neurons=neurons,
                neurons=neurons,
                experts=experts,
                gpu_experts=tuple(range(experts)),
            )
        )
    return tuple(joined)


def _prediction(sizes: ModelSizes, parts: Sequence[MemoryPlan], machine: Machine, sums: float) -> Prediction:
    """The slowest part, and the sums after each block."""
    each = [part.prediction for part in parts]
    peers, prompt = machine.peers, each[0].prompt
    assert peers is not None
    nbytes = SUMS_PER_LAYER * len(sizes.layers) * 4 * sizes.hidden_size * prompt
    return Prediction(
        seconds_empty=max(one.seconds_empty for one in each) + sums,
        seconds=max(one.seconds for one in each) + sums,
        seconds_full=max(one.seconds_full for one in each) + sums,
        prompt=prompt,
        prompt_seconds=max(one.prompt_seconds for one in each) + sums + nbytes / peers.bytes_per_second,
        stream_min_tokens=None,
    )


def _reason(plan: TensorPlan) -> str:
    """Which share each GPU has, and what the exchange costs."""
    peers = plan.machine.peers
    assert peers is not None
    total = sum(plan.shares)
    texts = [
        f"{share / total:.0%} of every layer on {gpu.name} (cuda:{gpu.index})"
        for gpu, share in zip(plan.machine.gpus, plan.shares, strict=True)
    ]
    sums, seconds = SUMS_PER_LAYER * len(plan.layers), 1e6 * peers.sum_seconds
    (item,) = (item for item in plan.items if item.item == SUMS)
    return (
        f"{', '.join(texts)}: they compute at the same time (tensor parallel); {sums} sums of "
        f"{seconds:.0f} µs ({peers.name}), with their norms, take {item.ms_per_token:.1f} ms of a token"
    )
