"""The share of each kernel in a decode step, from the driver's profile of replayed graphs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

FIRST_KERNEL = "embed_kernel"
"""The first kernel of a step."""
OUTPUT, DOWN = "output", "down"
_ATTENTION, _RESIDUAL = "decode_attention_kernel", "residual_kernel"
ROLES = {
    "rows_kernel": "q, k, v",
    _ATTENTION: "attention",
    "gated_kernel": "gate and up",
    "head_kernel": "head",
}


@dataclass(frozen=True)
class KernelRun:
    """One run of a kernel: name, start and end by the device's clock, in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class KernelShare:
    """A kernel's share of a step: runs per step, and the median seconds that a run adds.

    Kernels overlap by dependent launch: a run adds the time from the end of the previous run to its end.
    """

    role: str
    runs: int
    seconds: float

    @property
    def total_seconds(self) -> float:
        """Seconds of all its runs in a step."""
        return self.runs * self.seconds


def kernel_runs(device: torch.device, work: Callable[[], object]) -> list[KernelRun]:
    """The kernels that run on a GPU during `work`, ordered by their start."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize(device)
    runs = [
        KernelRun(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events() or ()
        if event.name.endswith("_kernel")
    ]
    return sorted(runs, key=lambda run: run.begin)


def step_shares(runs: Sequence[KernelRun]) -> list[KernelShare]:
    """The shares of a step's kernels, medians over the steps among `runs`, in order within a step.

    Incomplete steps, and steps with another number of kernels than most, are ignored.
    """
    steps: list[list[KernelRun]] = []
    for run in runs:
        if run.name == FIRST_KERNEL:
            steps.append([])
        if steps:
            steps[-1].append(run)
    if not steps:
        return []
    usual, _ = Counter(len(step) for step in steps).most_common(1)[0]
    added: dict[str, list[float]] = defaultdict(list)
    counted = [step for step in steps if len(step) == usual]
    for step in counted:
        for before, run, role in zip([None, *step], step, _roles(step), strict=False):
            added[role].append(run.end - (run.begin if before is None else before.end))
    return [KernelShare(role, len(times) // len(counted), median(times)) for role, times in added.items()]


def _roles(step: Sequence[KernelRun]) -> list[str]:
    """The role of each run; of a layer's two residuals, the one after attention belongs to attention."""
    roles: list[str] = []
    last = ""
    for run in step:
        if run.name == _RESIDUAL:
            roles.append(OUTPUT if last == _ATTENTION else DOWN)
        else:
            roles.append(ROLES.get(run.name, run.name.removesuffix("_kernel")))
        last = run.name
    return roles
