"""The verdict on a plan in one line: whether the model fits, on which devices, and how fast it is."""

from typing import Any

from edgeinfer_offload.planner.plan_types import PlanData

GIB = 1 << 30
PLACEMENTS = {"gpu": "on the GPU", "split": "split", "cpu": "on the CPU", "disk": "from disk"}
"""`PlanData.placement` in words."""


def plan_verdict(plan: PlanData) -> str:
    """For example "Fits. 36 of 36 layers on the GPU, 6.0 of 8 GiB, about 45 tokens/s"."""
    memory = "" if plan.placement == "disk" else size_of(*memory_of(plan))
    parts = [_placement(plan), memory, shown_speed(tokens_per_second(plan))]
    return ", ".join(filter(None, parts))


def verdict_fields(plan: PlanData) -> dict[str, Any]:
    """The verdict as JSON-compatible values."""
    return {
        "text": plan_verdict(plan),
        "placement": plan.placement,
        "layers": len(plan.layers),
        "gpu_layers": plan.gpu_layers,
        "gpu_weight_share": plan.gpu_weight_share,
        "tokens_per_second": tokens_per_second(plan),
    }


def tokens_per_second(plan: PlanData) -> float | None:
    """Decoded tokens per second, of an encoder those of texts; None: nothing was measured."""
    if plan.machine.origin == "unmeasured":
        return None
    prediction = plan.prediction
    return prediction.decode_tokens_per_second or prediction.prefill_tokens_per_second or None


def _placement(plan: PlanData) -> str:
    layers, on_gpu = len(plan.layers), plan.gpu_layers
    if plan.placement == "disk":
        return f"Doesn't fit. {binary_size(plan.file_weight_bytes)} of weights stay on disk"
    if plan.options.sparse and plan.options.sparse.window_slots:
        return "Doesn't fit. Active neurons are read from disk"
    mapped = ", memory-mapped" if plan.file_weight_bytes else ""
    if plan.placement == "split":
        return f"Fits, split. {plan.gpu_weight_share:.0%} of the weights on the GPU{mapped}"
    if plan.placement == "gpu":
        where = "the GPU" if len(plan.devices) == 1 else f"{len(plan.devices)} GPUs"
        return f"Fits. {on_gpu} of {layers} layers on {where}"
    return f"Fits. {layers} of {layers} layers on the CPU{mapped}"


def memory_of(plan: PlanData) -> tuple[int, int]:
    """Bytes on the devices that limit the plan, the CPU or all GPUs, and those that may be used there."""
    devices = plan.gpu_names if plan.gpu_bytes else ["cpu"]
    return plan.bytes_on(*devices), sum(plan.budgets[device] for device in devices)


def size_of(part: int, whole: int) -> str:
    """For example "6.0 of 8 GiB", or "44.9 MiB of 21.4 GiB"."""
    if part >= GIB // 10 and whole >= GIB:
        total = f"{whole / GIB:.1f}".removesuffix(".0")
        return f"{part / GIB:.1f} of {total} GiB"
    return f"{binary_size(part)} of {binary_size(whole)}"


def shown_speed(rate: float | None) -> str:
    """For example "about 45 tokens/s"; "" if it is unknown."""
    return "" if rate is None else f"about {shown_rate(rate, digits=2)} tokens/s"


def shown_rate(rate: float, digits: int = 3) -> str:
    """The rate with this number of digits, as a rule: "413", "44.2", "0.81"; all before the point."""
    return f"{rate:.0f}" if rate >= 10 ** (digits - 1) else f"{rate:.{digits}g}"


def binary_size(nbytes: float) -> str:
    """Bytes with three digits, in GiB from one on: "7.3 MiB", "785 MiB", "5.75 GiB", "16.4 GiB"."""
    mib, gib = nbytes / 2**20, nbytes / 2**30
    if mib < 1023.5:
        return f"{mib:.{0 if mib >= 99.95 else 1}f} MiB"
    return f"{gib:.{0 if gib >= 99.95 else 1 if gib >= 9.995 else 2}f} GiB"
