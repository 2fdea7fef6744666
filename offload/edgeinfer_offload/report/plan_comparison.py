"""The plans of one model for several machines, one row each."""

from collections.abc import Mapping
from typing import Any

from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.report.plan_text import DESCRIBED
from edgeinfer_offload.report.plan_verdict import (
    PLACEMENTS,
    memory_of,
    shown_rate,
    size_of,
    tokens_per_second,
)
from edgeinfer_offload.report.table import WIDTH, aligned

HEAD = ("machine", "fits", "memory", "tokens/s", "prompt/s")
Compared = Mapping[str, MemoryPlan | str]
"""Description of a machine -> its plan, or why the model doesn't fit."""


def comparison_text(plans: Compared) -> str:
    """A row for each machine, then why the model doesn't fit those marked "no"."""
    table = aligned([HEAD, *(_row(name, plan) for name, plan in plans.items())], {3, 4}, WIDTH)
    reasons = [f"{name}: {plan}" for name, plan in plans.items() if isinstance(plan, str)]
    return "\n".join([*table, "", *reasons, DESCRIBED.replace("machine was", "machines were")])


def _row(name: str, plan: MemoryPlan | str) -> tuple[str, ...]:
    if isinstance(plan, str):
        return name, "no", "-", "-", "-"
    rates = tokens_per_second(plan), plan.prediction.prefill_tokens_per_second
    speeds = ("-" if rate is None else shown_rate(rate) for rate in rates)
    return name, PLACEMENTS[plan.placement], size_of(*memory_of(plan)), *speeds


def comparison_fields(plans: Compared) -> list[dict[str, Any]]:
    """JSON-compatible values: for each machine, its plan or the reason."""
    return [
        {"device": name, **({"error": plan} if isinstance(plan, str) else plan.to_dict())}
        for name, plan in plans.items()
    ]
