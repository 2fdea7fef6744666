"""How fast this machine reads memory, and with how many threads: measured once, remembered per machine."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgeinfer_kernels.cpu.compiler.features import choose, detect, usable_cpus
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels, load_kernels
from edgeinfer_kernels.cpu.runtime.bandwidth import read_bandwidth as measure_reading
from edgeinfer_kernels.cpu.runtime.bandwidth import uncached_bytes, usual_bandwidths
from edgeinfer_kernels.cuda.driver import driver_version, list_gpus
from edgeinfer_offload.machine.host_memory import host_memory
from edgeinfer_offload.machine.measured_figures import MeasuredFigures

SWEEP_SECONDS = 0.8
TOO_FEW_TO_SHARE = 4
FREE_SHARE = 4
"""The part of free memory that measuring may take."""
WORTH_PER_THREAD = 1.05
"""More threads are taken only if they read at least this much faster."""


def read_bandwidth(cache_folder: Path, threads: int | None = None) -> float:
    """Bytes per second that `threads` (None: all usable) read together, measured now in half a second."""
    kernels = load_kernels(cache_folder, choose())
    return measure_reading(kernels, threads or usable_cpus(), reading_bytes())


def reading_bytes() -> int:
    """How much memory is read where caches aren't to help, without taking much of what is free."""
    return uncached_bytes(most=host_memory().free_bytes // FREE_SHARE)


def remembered_bandwidth(cache_folder: Path, threads: int) -> float:
    """`read_bandwidth`, measured on first use and kept beside the kernels for this processor."""
    figures = remembered_figures(cache_folder)
    return figures.figure(f"{threads} threads", lambda: read_bandwidth(cache_folder, threads))


def remembered_threads(cache_folder: Path, kernels: Kernels) -> int:
    """The number of threads to decode with: a sweep of less than a second on first use, then remembered."""
    usable = usable_cpus()
    key = f"best of {usable} threads"
    if len(thread_counts(usable)) == 1:
        return usable
    best = remembered_figures(cache_folder).figure(key, lambda: best_threads(sweep(kernels, usable)))
    return min(max(int(best), 1), usable)


def known_threads(cache_folder: Path) -> int | None:
    """What `remembered_threads` returns, where nothing has to be measured for it; else None."""
    usable = usable_cpus()
    if len(thread_counts(usable)) == 1:
        return usable
    best = remembered_figures(cache_folder).known().get(f"best of {usable} threads")
    return None if best is None else min(max(int(best), 1), usable)


@dataclass(frozen=True)
class ThreadChoice:
    """How many threads decode if nobody says otherwise, and why."""

    count: int
    why: str


def thread_choice(cache_folder: Path) -> ThreadChoice:
    """What `remembered_threads` gives, with its reason; measured now if it hasn't been."""
    usable, machine = usable_cpus(), os.cpu_count() or 1
    limit = f"; the machine has {machine}, affinity or a quota allows no more" if usable < machine else ""
    tried = thread_counts(usable)
    if len(tried) == 1:
        return ThreadChoice(usable, f"all usable processors{limit}")
    count = remembered_threads(cache_folder, load_kernels(cache_folder, choose()))
    others = ", ".join(map(str, tried))
    return ThreadChoice(count, f"of {others} the fewest that read memory at full speed, measured once{limit}")


def thread_counts(usable: int) -> list[int]:
    """Counts worth trying, rising: all usable processors, and half of them where two may share a core.

    Four and fewer are all used: a busy moment would mislead the sweep more than it could gain.
    """
    return [usable] if usable <= TOO_FEW_TO_SHARE else [usable // 2, usable * 3 // 4, usable]


def sweep(kernels: Kernels, usable: int) -> dict[int, float]:
    """Count -> bytes per second of the usual pass."""
    return usual_bandwidths(kernels, thread_counts(usable), reading_bytes(), SWEEP_SECONDS)


def best_threads(rates: dict[int, float]) -> int:
    """The count that reads fastest; of two that are about equal, the smaller."""
    best = min(rates)
    for count in sorted(rates):
        if rates[count] > rates[best] * WORTH_PER_THREAD:
            best = count
    return best


def remembered_figures(cache_folder: Path) -> MeasuredFigures:
    """What has been measured on this machine: its processor, memory and GPUs as they are now."""
    gpus = ", ".join(f"{gpu.name} {gpu.total_bytes}" for gpu in list_gpus())
    memory = psutil.virtual_memory().total >> 30
    parts = (platform.node(), detect().name, usable_cpus(), f"{memory} GiB", gpus, driver_version())
    return MeasuredFigures(cache_folder, " | ".join(map(str, parts)))
