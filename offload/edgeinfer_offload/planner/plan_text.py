"""The plan as text: a table with one line for similar layers, then the predictions and the reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edgeinfer_offload.planner.plan_types import DRAFT, PlanData, PlannedItem

MAX_RANGES = 4
"""Maximum number of layer ranges that a line lists; more are only counted."""
HEAD = ("item", "device", "MiB", "ms/token", "bound by")


@dataclass(frozen=True)
class PlanLine:
    item: str
    device: str
    nbytes: int
    ms_per_token: float | None
    bound: str
    overlapped: bool

    def cells(self) -> tuple[str, ...]:
        size = f"{self.nbytes / 2**20:.1f}" if self.nbytes else "-"
        apart = "when it drafts" if self.item == DRAFT else "overlapped"
        bound = ", ".join(filter(None, [self.bound, apart])) if self.overlapped else self.bound
        unknown = self.ms_per_token is None or (self.overlapped and not self.bound)
        milliseconds = "-" if unknown else f"{self.ms_per_token:.3f}"
        return self.item, self.device, size, milliseconds, bound


def plan_text(plan: PlanData, details: bool = False) -> str:
    """The whole plan as text; `details`: one line per layer and part."""
    lines = [PlanLine(i.item, i.device, i.bytes, i.ms_per_token, i.bound, i.overlapped) for i in plan.items]
    if not details:
        lines = _grouped(plan.items)
    if _milliseconds(plan) is None:
        lines = [replace(line, ms_per_token=None, bound="", overlapped=False) for line in lines]
    total = PlanLine("total", "", sum(i.bytes for i in plan.items), _milliseconds(plan), "", False)
    rows = [HEAD, *(line.cells() for line in (*lines, total))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    table = [_aligned(row, widths) for row in rows]
    return "\n".join([*table, "", *_memory(plan), *_speed(plan), *_warnings(plan)])


def _milliseconds(plan: PlanData) -> float | None:
    """Milliseconds per token; None: nothing was measured, or an encoder decodes nothing."""
    return None if plan.machine.origin == "unmeasured" else plan.ms_per_token or None


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if column in (2, 3) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _grouped(items: Iterable[PlannedItem]) -> list[PlanLine]:
    """One line for the same part of several layers on the same device."""
    groups: dict[tuple[str, str, str, bool], list[PlannedItem]] = {}
    for item in items:
        what = item.item if item.layer is None else item.item.removeprefix(f"layer {item.layer} ")
        groups.setdefault((what, item.device, item.bound, item.overlapped), []).append(item)
    lines = []
    for (what, device, bound, overlapped), members in groups.items():
        numbers = [member.layer for member in members if member.layer is not None]
        name = f"{_layers(numbers)} {what}" if numbers else what
        nbytes, ms = sum(m.bytes for m in members), sum(m.ms_per_token for m in members)
        lines.append(PlanLine(name, device, nbytes, ms, bound, overlapped))
    return lines


def _layers(numbers: Sequence[int]) -> str:
    """For example "layer 3", "layers 0-11, 14" or "17 layers:"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if len(ranges) > MAX_RANGES:
        return f"{len(numbers)} layers:"
    return "layers " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _memory(plan: PlanData) -> list[str]:
    held = {device: plan.bytes_on(device) for device in plan.budgets}
    lines = [
        f"{device}: {mebibytes(nbytes)} of {mebibytes(plan.budgets[device])} that may be used"
        for device, nbytes in held.items()
        if nbytes
    ]
    if plan.file_bytes:
        lines.append(f"disk: {mebibytes(plan.file_bytes)} are memory-mapped")
        if plan.rereads_file:
            room = mebibytes(plan.file_cache_bytes)
            lines[-1] += f"; the page cache has {room}, so each token reads the rest from the disk again"
    if plan.repacking:
        lines.append(_repacked(plan))
    return lines


def _repacked(plan: PlanData) -> str:
    done = plan.repacking
    assert done is not None
    if not done.bytes:
        return "nothing was repacked: the weights are memory-mapped"
    pages = "were released" if done.released else "stay mapped"
    return (
        f"repacked {mebibytes(done.bytes)} in {done.seconds:.2f} s "
        f"({done.bytes / max(done.seconds, 1e-9) / 1e9:.1f} GB/s); the file's pages {pages}"
    )


def _speed(plan: PlanData) -> list[str]:
    prediction = plan.prediction
    if plan.machine.origin == "unmeasured":
        return []
    if not prediction.seconds:
        rate = prediction.prefill_tokens_per_second
        return [f"texts: {rate:.0f} tokens/s, in steps of at most {prediction.prompt} tokens"]
    depth = plan.options.planned_depth
    lines = [
        f"decode: {_rate(prediction.seconds)} tokens/s after {depth} tokens "
        f"({_rate(prediction.seconds_empty)} after none, {_rate(prediction.seconds_full)} "
        f"with the context of {plan.options.context} full), without drafting",
        f"prompt: {prediction.prefill_tokens_per_second:.0f} tokens/s for {prediction.prompt} tokens",
    ]
    if prediction.stream_min_tokens:
        lines[-1] += f"; from {prediction.stream_min_tokens} tokens on, weights are streamed to the GPU"
    if plan.rate_with_one_gib_more:
        lines.append(f"with 1 GiB more of GPU memory: {_shown(plan.rate_with_one_gib_more)} tokens/s")
    return lines


def _warnings(plan: PlanData) -> list[str]:
    lines = [plan.limit_reason] if plan.limit_reason else []
    lines += [f"so that it fits, {relaxation}" for relaxation in plan.relaxations]
    if plan.machine.origin == "described":
        lines.append("the machine was described, not measured: expect these speeds to be off by a quarter")
    return lines


def _rate(seconds: float) -> str:
    return _shown(1 / seconds)


def _shown(rate: float) -> str:
    """The rate with three digits."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def mebibytes(nbytes: float) -> str:
    """For example "7.3 MiB" or "19456 MiB"."""
    return f"{nbytes / 2**20:.{0 if nbytes >= 100 * 2**20 else 1}f} MiB"
