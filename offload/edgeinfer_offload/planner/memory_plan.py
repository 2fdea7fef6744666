"""The finished plan, with its text and JSON output, and the error if there is no plan."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer_offload.planner.plan_types import PlanData, PlannedItem
from edgeinfer_offload.report.plan_text import plan_text
from edgeinfer_offload.report.plan_verdict import binary_size, verdict_fields


class PlanError(ValueError):
    """No plan fits the budget; the message has the bytes needed, the bytes allowed, and the largest part."""


@dataclass(frozen=True)
class MemoryPlan(PlanData):
    """The placement of all parts, and the cost of decoding one token."""

    def explain(self, details: bool = False, verbose: bool = True) -> str:
        """The plan as text; `details`: one line per layer and part; `verbose`: also budgets and speeds."""
        return plan_text(self, details, verbose)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible values."""
        prediction = self.prediction
        return {
            "verdict": verdict_fields(self),
            "items": [self._item(item) for item in self.items],
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "head": self.head,
            "embedding": self.embedding,
            "draft": self.draft,
            "context": self.options.context,
            "parallel": self.options.sequences,
            "kv": self.options.kv,
            "bytes": {device: self.bytes_on(device) for device in (*self.budgets, "disk")},
            "budgets": {"vram": self.vram_bytes, "ram": self.ram_bytes},
            "prediction": {
                "ms_per_token": self.ms_per_token,
                "decode_tokens_per_second": prediction.decode_tokens_per_second,
                "decode_tokens_per_second_empty": _inverse(prediction.seconds_empty),
                "decode_tokens_per_second_full": _inverse(prediction.seconds_full),
                "prompt_tokens": prediction.prompt,
                "prefill_tokens_per_second": prediction.prefill_tokens_per_second,
                "stream_min_tokens": prediction.stream_min_tokens,
                "decode_tokens_per_second_with_one_gib_more": self.rate_with_one_gib_more,
            },
            "limit_reason": self.limit_reason,
            "relaxations": list(self.relaxations),
            "machine": _finite(dataclasses.asdict(self.machine)),
        }

    def _item(self, item: PlannedItem) -> dict[str, Any]:
        limit = item.limited_by(self.machine) or None
        return {**dataclasses.asdict(item), "intensity": item.intensity, "limited_by": limit}


def _inverse(seconds: float) -> float:
    return 1 / seconds if seconds else 0.0


def _finite(value: Any) -> Any:
    """The value with infinite (unknown) speeds replaced by null."""
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, tuple):
        return [_finite(member) for member in value]
    return None if value == float("inf") else value


def refuse(device: str, needed: float, allowed: float, items: Sequence[PlannedItem]) -> PlanError:
    """The error for items that don't fit a device."""
    parts = Counter[str]()
    for item in items:
        name = item.item if item.layer is None else item.item.removeprefix(f"layer {item.layer} ")
        parts[name] += item.bytes
    ((largest, nbytes),) = parts.most_common(1)
    shown = largest.replace("keys and values", "KV cache")
    return PlanError(
        f"the model needs {binary_size(needed)} on the {device}, {binary_size(allowed)} may be used; "
        f"the largest part is the {shown} with {binary_size(nbytes)}"
    )
