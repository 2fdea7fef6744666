"""Measure the memory read bandwidth and the best thread count of this machine; results are stored per
machine.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgeinfer_kernels.cpu.compiler.features import choose, detect
from edgeinfer_kernels.cpu.compiler.kernel_cache import BuildProgress, Kernels, load_kernels
from edgeinfer_kernels.cpu.runtime.bandwidth import read_bandwidth as measure_reading
from edgeinfer_kernels.cpu.runtime.bandwidth import uncached_bytes, usual_bandwidths
from edgeinfer_kernels.cuda.driver import driver_version, list_gpus
from edgeinfer_kernels.system.processor import fast_cpus, usable_cpus
from edgeinfer_offload.machine.host_memory import host_memory
from edgeinfer_offload.machine.measured_figures import MeasuredFigures

SWEEP_SECONDS = 0.8
TOO_FEW_TO_SHARE = 4
FREE_SHARE = 4
"""Measuring uses at most one part in FREE_SHARE of the free memory."""
MAX_DRAFT_FIGURES = 2_000
"""About thirty of each model."""
MIN_SPLIT_POSITIONS = 1.05
"""A higher thread count is used only if it reads at least this many times as fast."""


def read_bandwidth(cache_folder: Path, threads: int | None = None) -> float:
    """Bytes per second that `threads` (None: all usable) read together; measured now in half a second."""
    kernels = load_kernels(cache_folder, choose())
    return measure_reading(kernels, threads or usable_cpus(), reading_bytes())


def reading_bytes() -> int:
    """Bytes to read in a measurement: larger than caches, and a small part of the free memory."""
    return uncached_bytes(max_bytes=host_memory().free_bytes // FREE_SHARE)


def measured_bandwidth(cache_folder: Path, threads: int) -> float:
    """`read_bandwidth`, measured on first use and stored next to the kernels for this processor."""
    figures = stored_figures(cache_folder)
    return figures.figure(f"{threads} threads", lambda: read_bandwidth(cache_folder, threads))


def measured_threads(cache_folder: Path, progress: BuildProgress | None = None) -> int:
    """The thread count for decoding; the first use measures it in less than a second and stores it.
    `progress` is called if kernels have to be compiled for it.
    """
    known = stored_threads(cache_folder)
    if known is not None:
        return known
    usable, kernels = fast_cpus(), load_kernels(cache_folder, choose(), progress=progress)
    key = f"best of {usable} threads"
    best = stored_figures(cache_folder).figure(key, lambda: best_threads(sweep(kernels, usable)))
    return min(max(int(best), 1), usable)


def stored_threads(cache_folder: Path) -> int | None:
    """The stored result of `measured_threads`; None: it isn't measured yet."""
    usable = fast_cpus()
    if len(thread_counts(usable)) == 1:
        return usable
    best = stored_figures(cache_folder).known().get(f"best of {usable} threads")
    return None if best is None else min(max(int(best), 1), usable)


@dataclass(frozen=True)
class ThreadSelection:
    """The default thread count for decoding, and the reason for it."""

    count: int
    why: str


def select_threads(cache_folder: Path) -> ThreadSelection:
    """The result of `measured_threads` with its reason; measured now if necessary."""
    usable, machine = usable_cpus(), os.cpu_count() or 1
    limit = f"; the machine has {machine}, affinity or a quota allows no more" if usable < machine else ""
    fast, which = fast_cpus(), "all usable processors"
    if fast < usable:
        which, limit = "all fast processors", f"; the other {usable - fast} are slower cores{limit}"
    tried = thread_counts(fast)
    if len(tried) == 1:
        return ThreadSelection(fast, f"{which}{limit}")
    count = measured_threads(cache_folder)
    others = ", ".join(map(str, tried))
    return ThreadSelection(
        count, f"of {others} the fewest that read memory at full speed, measured once{limit}"
    )


def thread_counts(usable: int) -> list[int]:
    """Thread counts to try, rising: all usable processors, and half of them if two may share a core.

    Four or fewer are all used: a short load peak would distort the sweep more than the sweep can gain.
    """
    return [usable] if usable <= TOO_FEW_TO_SHARE else [usable // 2, usable * 3 // 4, usable]


def sweep(kernels: Kernels, usable: int) -> dict[int, float]:
    """Thread count -> bytes per second of the standard read benchmark."""
    return usual_bandwidths(kernels, thread_counts(usable), reading_bytes(), SWEEP_SECONDS)


def best_threads(rates: dict[int, float]) -> int:
    """The thread count that reads fastest; the smaller one if two are about equal."""
    best = min(rates)
    for count in sorted(rates):
        if rates[count] > rates[best] * MIN_SPLIT_POSITIONS:
            best = count
    return best


def stored_figures(cache_folder: Path) -> MeasuredFigures:
    """The stored measurements of this machine, for its current processor, memory and GPUs."""
    return MeasuredFigures(cache_folder, _machine())


def stored_draft_figures(cache_folder: Path) -> MeasuredFigures:
    """Those of drafting on this machine, of the models that were loaded last."""
    return MeasuredFigures(cache_folder, _machine(), "drafting.json", MAX_DRAFT_FIGURES)


def _machine() -> str:
    gpus = ", ".join(f"{gpu.name} {gpu.total_bytes}" for gpu in list_gpus())
    memory = psutil.virtual_memory().total >> 30
    parts = (platform.node(), detect().name, usable_cpus(), f"{memory} GiB", gpus, driver_version())
    return " | ".join(map(str, parts))
