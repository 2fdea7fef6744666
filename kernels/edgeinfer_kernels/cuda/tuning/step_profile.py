"""The share of each kernel in a decode step, from the driver's profile of replayed graphs."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

FIRST_KERNEL = "embed_kernel"
"""The first kernel of a step."""
OUTPUT, DOWN = "output", "down"
_ATTENTION, _GATED = "decode_attention_kernel", "gated_kernel"
_COMBINING = "combine_splits_kernel"
_GATE_INPUTS = "gate_inputs_kernel"
_PRODUCTS = ("rows_kernel", "residual_kernel")
ROLES = {
    _ATTENTION: "attention",
    _GATED: "gate and up",
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
    """A kernel's share of a step: runs per step, and the seconds that a run adds (means of a step; of these
    the median of all steps).

    Kernels overlap by dependent launch: a run adds the time from the end of the previous run to its end.
    """

    role: str
    runs: int
    seconds: float

    @property
    def total_seconds(self) -> float:
        """Seconds of all its runs in a step."""
        return self.runs * self.seconds


class KernelProfile:
    """Records the kernels that run on a GPU, from its creation until `runs`."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def runs(self) -> list[KernelRun]:
        """The kernels, ordered by their start."""
        torch.cuda.synchronize(self._device)
        self._profile.stop()
        runs = [
            KernelRun(short_name(event.name), event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in self._profile.events() or ()
            if "kernel" in event.name.lower()
        ]
        return sorted(runs, key=lambda run: run.begin)


def kernel_runs(device: torch.device, work: Callable[[], object]) -> list[KernelRun]:
    """The kernels that run on a GPU during `work`, ordered by their start."""
    profile = KernelProfile(device)
    work()
    return profile.runs()


def short_name(name: str) -> str:
    """The name of a kernel of C++ without its result, namespaces, template and parameters."""
    found = re.match(r"(?:void )?(?:\(anonymous namespace\)::|\w+::)*(\w+)", name)
    return found[1] if found else name


def seconds_between_steps(runs: Sequence[KernelRun]) -> float:
    """From the start of a step to that of the next one, the median; 0.0: fewer than two steps."""
    begins = [run.begin for run in runs if run.name == FIRST_KERNEL]
    return median(after - before for before, after in pairwise(begins)) if len(begins) > 1 else 0.0


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
    added: dict[str, list[list[float]]] = defaultdict(list)
    for step in (step for step in steps if len(step) == usual):
        own: dict[str, list[float]] = defaultdict(list)
        for before, run, role in zip([None, *step], step, _roles(step), strict=False):
            own[role].append(run.end - (run.begin if before is None else before.end))
        for role, times in own.items():
            added[role].append(times)
    return [
        KernelShare(role, len(times[0]), median(map(sum, times)) / len(times[0]))
        for role, times in added.items()
    ]


def _roles(step: Sequence[KernelRun]) -> list[str]:
    """The role of each run; products of a matrix are known by the kernels before and after them."""
    names = [run.name for run in step]
    return [_role(*around) for around in zip(["", *names], names, [*names[1:], ""], strict=False)]


def _role(before: str, name: str, after: str) -> str:
    if name not in _PRODUCTS:
        return ROLES.get(name, name.removesuffix("_kernel"))
    if before in (_ATTENTION, _COMBINING):
        return OUTPUT
    if before == _GATED:
        return DOWN
    if _GATE_INPUTS in (before, after):
        return "per-layer gate" if after == _GATE_INPUTS else "per-layer projection"
    return "q, k, v" if name == "rows_kernel" else DOWN
