"""The decode speed of a plan over batch size and context length, by the roofline model.

Source: Yuan et al., "LLM Inference Unveiled: Survey and Roofline Model Insights" (2024), section 2.4.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.plan_types import Limit, PlanData, PlannedItem
from edgeinfer_offload.report.plan_verdict import (
    PLACEMENTS,
    binary_size,
    memory_of,
    shown_rate,
    size_of,
    tokens_per_second,
)
from edgeinfer_offload.report.table import aligned

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 1024, 4096, 16384, 65536, 262144, 1048576)
MAX_CONTEXTS = 5
PlanFor = Callable[[int], PlanData | None]
"""Returns the plan for a context in tokens; None: it doesn't fit."""


@dataclass(frozen=True)
class CurvePoint:
    """A step of `batch` sequences, each of which has half of `context` tokens in its cache.

    `tokens_per_second`: of all sequences together; None: their caches don't fit. `intensity`: operations for
    each byte read; `limited_by`: what takes most of the step.
    """

    batch: int
    context: int
    tokens_per_second: float | None
    intensity: float
    limited_by: Limit


@dataclass(frozen=True)
class PlanCurve:
    """The plans of several contexts, and the points of each."""

    plans: dict[int, PlanData | None]
    points: list[CurvePoint]

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values."""
        contexts = [
            {
                "context": context,
                "placement": plan.placement if plan else None,
                "memory_bytes": plan.nbytes if plan else None,
                "cache_bytes": plan.cache_bytes if plan else None,
                "decode_tokens_per_second": plan.prediction.decode_tokens_per_second if plan else None,
                "prefill_tokens_per_second": plan.prediction.prefill_tokens_per_second if plan else None,
            }
            for context, plan in self.plans.items()
        ]
        return {"contexts": contexts, "points": [dataclasses.asdict(point) for point in self.points]}


def plan_curve(sizes: ModelSizes, plan_for: PlanFor, trained_context: int) -> PlanCurve:
    """The curve of a model on the machine of its plans, up to the trained context."""
    shorter = [context for context in CONTEXTS if context < trained_context]
    plans = {context: plan_for(context) for context in [*shorter, trained_context][-MAX_CONTEXTS:]}
    points = []
    for context, plan in plans.items():
        if plan is not None and not sizes.is_encoder:
            points += [_point(sizes, plan, context, batch) for batch in BATCHES]
    return PlanCurve(plans, points)


def _point(sizes: ModelSizes, plan: PlanData, context: int, batch: int) -> CurvePoint:
    by_limit: dict[Limit, float] = {}
    operations = read = 0.0
    for item in plan.items:
        reads = _reads(sizes, item, batch)
        work = item.work(batch, reads)
        operations, read = operations + work.operations, read + work.bytes
        if not item.overlapped:
            milliseconds = item.milliseconds(batch, plan.machine, reads)
            limit = _limit(item, plan, milliseconds, batch, reads)
            by_limit[limit] = by_limit.get(limit, 0.0) + milliseconds
    rate = 1000 * batch / sum(by_limit.values()) if _fits(plan, batch) else None
    slowest = max(by_limit, key=lambda limit: by_limit[limit])
    return CurvePoint(batch, context, rate, operations / read if read else 0.0, slowest)


def _reads(sizes: ModelSizes, item: PlannedItem, batch: int) -> float:
    """How many times the bytes of one token a step reads: weights once, of experts those of all tokens, and
    the cache of each sequence.
    """
    if not item.weights_read:
        return batch
    block = None if item.layer is None else sizes.layers[item.layer].routed
    if block is None or item.read_bytes >= item.bytes:
        return 1
    share = block.granules_per_token / block.granules
    return (1 - (1 - share) ** batch) / share


def _limit(item: PlannedItem, plan: PlanData, milliseconds: float, batch: int, reads: float) -> Limit:
    """What takes most of the milliseconds of a step."""
    if item.bound == "disk":
        return "disk"
    is_starting = not item.reading_ms or item.ms_per_token - item.reading_ms > milliseconds / 2
    return "latency" if is_starting else item.bound_of(batch, plan.machine, reads)


def _fits(plan: PlanData, batch: int) -> bool:
    """Whether the caches of `batch` sequences fit; those of layers on the CPU in main memory."""
    more = {
        device: (batch - 1)
        * sum(item.bytes for item in plan.items if item.is_cache and item.device == device)
        for device in plan.budgets
    }
    return all(plan.bytes_on(device) + more[device] <= plan.budgets[device] for device in plan.budgets)


def curve_text(curve: PlanCurve) -> str:
    """Two tables: the contexts with their plans, then the speed by batch and context."""
    head = ["context", "cache", "memory", "fits", "tokens/s", "prompt/s"]
    rows = [_context_row(context, plan) for context, plan in curve.plans.items()]
    text = aligned([head, *rows], {0, 1, 2, 4, 5})
    if not curve.points:
        return "\n".join(text)
    contexts = list(dict.fromkeys(point.context for point in curve.points))
    by_batch = [["batch", "FLOP/B", "bound by", *map(str, contexts)]]
    for batch in BATCHES:
        points = [point for point in curve.points if point.batch == batch]
        rates = [_shown(point.tokens_per_second) for point in points]
        by_batch.append([str(batch), shown_rate(points[0].intensity), points[0].limited_by, *rates])
    title = "Tokens/s of all sequences by batch and context; FLOP/B: of the shortest context"
    return "\n".join([*text, "", title, *aligned(by_batch, {*range(len(by_batch[0]))} - {2})])


def _context_row(context: int, plan: PlanData | None) -> list[str]:
    if plan is None:
        return [str(context), "-", "-", "no", "-", "-"]
    prompt = plan.prediction.prefill_tokens_per_second
    speed = tokens_per_second(plan)
    fits = PLACEMENTS[plan.placement]
    memory = size_of(*memory_of(plan))
    return [str(context), binary_size(plan.cache_bytes), memory, fits, _shown(speed), _shown(prompt)]


def _shown(rate: float | None) -> str:
    return "-" if rate is None else shown_rate(rate)
