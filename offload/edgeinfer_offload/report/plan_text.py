"""The plan as text: the verdict, a table with one line for similar layers, then predictions and reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.plan_types import DRAFTS, PlanData, PlannedItem
from edgeinfer_offload.planner.roofline import Work
from edgeinfer_offload.report.plan_verdict import binary_size, plan_verdict, shown_rate
from edgeinfer_offload.report.table import WIDTH, aligned

MAX_RANGES = 4
"""Maximum number of layer ranges that a line lists; more are only counted."""
HEAD = ("item", "on", "size", "ms", "FLOP/B", "bound by")
RIGHT = (2, 3, 4)
"""Columns of numbers."""
DESCRIBED = "the machine was described, not measured: expect these speeds to be off by a quarter"
OVERLAPPED = "*: at the same time as the other device's part; not in the total"


@dataclass(frozen=True)
class PlanLine:
    item: str
    device: str
    nbytes: int
    ms_per_token: float | None
    bound: str
    """memory, compute, latency or disk."""
    overlapped: bool
    intensity: float = 0.0
    """Operations for each byte that is read."""

    def cells(self) -> tuple[str, ...]:
        size = binary_size(self.nbytes) if self.nbytes else "-"
        bound = f"{self.bound}*" if self.overlapped and self.bound else self.bound
        milliseconds = _milliseconds(self.ms_per_token) if self.ms_per_token else "-"
        intensity = shown_rate(self.intensity) if self.intensity else "-"
        drafting = self.overlapped and self.item in DRAFTS
        return self.item, self.device, size, milliseconds, intensity, "drafting" if drafting else bound


def plan_text(plan: PlanData, details: bool = False, verbose: bool = True) -> str:
    """The plan as text; `details`: one line per layer and part; `verbose`: also budgets and speeds."""
    lines = _grouped(plan.items, plan.machine, details)
    work = _work(plan.items)
    total = PlanLine("total", "", sum(i.bytes for i in plan.items), _total(plan), "", False, _intensity(work))
    if total.ms_per_token is None:
        lines = [replace(line, ms_per_token=None, bound="", overlapped=False) for line in lines]
    notes = [OVERLAPPED] if any(line.overlapped and line.item not in DRAFTS for line in lines) else []
    table = aligned([HEAD, *(line.cells() for line in (*lines, total))], RIGHT, WIDTH)
    text = [plan_verdict(plan), "", *table, *notes]
    following = [*_memory(plan), *_speed(plan), *_limit(plan)] if verbose else []
    following += _warnings(plan)
    return "\n".join([*text, *(["", *following] if following else [])])


def _total(plan: PlanData) -> float | None:
    """Milliseconds per token; None: nothing was measured, or an encoder decodes nothing."""
    return None if plan.machine.origin == "unmeasured" else plan.ms_per_token or None


def _milliseconds(count: float) -> str:
    return f"{count:.3f}" if count < 10 else f"{count:.2f}" if count < 100 else f"{count:.0f}"


def _work(items: Iterable[PlannedItem]) -> Work:
    """What decoding a token computes and reads, without drafting."""
    counted = [item for item in items if item.read_bytes]
    return Work(sum(item.operations for item in counted), sum(item.read_bytes for item in counted))


def _intensity(work: Work) -> float:
    return work.intensity if work.bytes else 0.0


def _grouped(items: Iterable[PlannedItem], machine: Machine, details: bool) -> list[PlanLine]:
    """One line for the same part of several layers on the same device; `details`: of each layer."""
    groups: dict[tuple[str, str, str, bool], list[PlannedItem]] = {}
    for item in items:
        what = item.item
        if item.layer is not None and not details:
            what = what.removeprefix(f"layer {item.layer} ")
        groups.setdefault((what, item.device, item.limited_by(machine), item.overlapped), []).append(item)
    lines = []
    for (what, device, bound, overlapped), members in groups.items():
        numbers = [member.layer for member in members if member.layer is not None]
        name = f"{_layers(numbers)} {what}" if numbers and not details else what
        nbytes, ms = sum(m.bytes for m in members), sum(m.ms_per_token for m in members)
        lines.append(PlanLine(name, device, nbytes, ms, bound, overlapped, _intensity(_work(members))))
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
        f"{device}: {binary_size(nbytes)} of {binary_size(plan.budgets[device])} that may be used"
        for device, nbytes in held.items()
        if nbytes
    ]
    if plan.file_bytes:
        lines.append(f"disk: {binary_size(plan.file_bytes)} are memory-mapped")
        if plan.reads_ahead:
            lines[-1] += "; each token reads those of the layers from the disk, ahead of their use"
        elif plan.rereads_file:
            room = binary_size(plan.file_cache_bytes)
            lines[-1] += f"; the page cache has {room}, so each token reads the rest from the disk again"
    if plan.options.sparse and (slots := plan.options.sparse.window_slots):
        lines.append(
            f"active neurons: {slots} neurons of each layer are in memory, the others are read from the "
            "bundle file"
        )
    if plan.repacking:
        lines.append(_repacked(plan))
    if (count := plan.options.sequences) > 1:
        each = binary_size(plan.cache_bytes // count)
        lines.append(f"parallel: {count} requests at once, {each} of cache for each")
    return lines


def _repacked(plan: PlanData) -> str:
    done = plan.repacking
    assert done is not None
    if not done.bytes:
        return "nothing was repacked: the weights are memory-mapped"
    pages = "were released" if done.released else "stay mapped"
    return (
        f"repacked {binary_size(done.bytes)} in {done.seconds:.2f} s "
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
        lines.append(f"with 1 GiB more of GPU memory: {shown_rate(plan.rate_with_one_gib_more)} tokens/s")
    return lines


def _limit(plan: PlanData) -> list[str]:
    return [plan.limit_reason] if plan.limit_reason else []


def _warnings(plan: PlanData) -> list[str]:
    lines = [f"so that it fits, {relaxation}" for relaxation in plan.relaxations]
    return [*lines, *([DESCRIBED] if plan.machine.origin == "described" else [])]


def _rate(seconds: float) -> str:
    return shown_rate(1 / seconds)
