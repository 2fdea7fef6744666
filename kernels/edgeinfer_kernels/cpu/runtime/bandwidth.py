"""Reading memory and nothing else: what decoding can't be faster than."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from edgeinfer_kernels.cpu.compiler.features import usable_cpus
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import address, allocate
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool

MIN_READ = 256 << 20
CACHES = Path("/sys/devices/system/cpu")
CACHES_READ = 4
"""How many times what caches hold has to be read, again and again, so that next to nothing is found there: of
twice as much a cache that evicts at random still has a fifth, of four times a fiftieth.
"""


def read_bandwidth(kernels: Kernels, threads: int, nbytes: int = 0, seconds: float = 0.5) -> float:
    """Bytes per second that `threads` read together from `nbytes` of memory (0: more than caches hold); the
    best pass of `seconds`.
    """
    with _readers(kernels, [threads], nbytes) as (read,):
        best, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            best = max(best, read())
    return best


def usual_bandwidths(
    kernels: Kernels, counts: Sequence[int], nbytes: int = 0, seconds: float = 0.8
) -> dict[int, float]:
    """The same of the median pass, for several numbers of threads that take turns for `seconds` in all: what
    else runs here slows them alike, and those it hinders most show it.
    """
    with _readers(kernels, counts, nbytes) as readers:
        found: list[list[float]] = [[] for _ in counts]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not found[0]:
            for rates, read in zip(found, readers, strict=True):
                read()  # its threads wake up
                rates.append(read())
    return dict(zip(counts, map(median, found), strict=True))


@contextmanager
def _readers(kernels: Kernels, counts: Sequence[int], nbytes: int) -> Iterator[list[Callable[[], float]]]:
    """For each number of threads what reads all memory once, and gives bytes per second."""
    nbytes = nbytes or uncached_bytes()
    memory = allocate(nbytes)
    memory[:] = 1
    sums = np.zeros(8 * max(counts), np.int64)
    call = np.array([nbytes, address(sums)], np.int64)
    teams = [ThreadPool(kernels, threads) for threads in counts]

    def reader(team: ThreadPool) -> Callable[[], float]:
        def read() -> float:
            begin = time.perf_counter()
            team.run(kernels.address("read_memory"), address(memory), address(call))
            return nbytes / (time.perf_counter() - begin)

        return read

    try:
        yield [reader(team) for team in teams]
    finally:
        for team in teams:
            team.close()


def uncached_bytes(folder: Path = CACHES, most: int | None = None) -> int:
    """So much memory that reading it in turns finds next to nothing in this processor's caches, `most` bytes
    (but not less than MIN_READ) at most.
    """
    wanted = CACHES_READ * last_level_bytes(folder)
    return max(MIN_READ, wanted if most is None else min(wanted, most))


def last_level_bytes(folder: Path = CACHES) -> int:
    """Bytes of the last caches before memory, of all sockets that we may use together; 0: unknown."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(usable_cpus())
    found: dict[int, dict[str, int]] = {}
    for cpu in usable:
        for cache in (folder / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level, size, shared = (
                    (cache / name).read_text(encoding="ascii").strip()
                    for name in ("level", "size", "shared_cpu_list")
                )
                nbytes = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
            except (OSError, ValueError, KeyError):
                continue
            found.setdefault(int(level), {})[shared] = nbytes
    return sum(found[max(found)].values()) if found else 0
