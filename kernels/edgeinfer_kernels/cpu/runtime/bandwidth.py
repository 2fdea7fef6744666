"""Measures memory read bandwidth, the upper limit of decode speed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from pathlib import Path
from statistics import median

import numpy as np

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.kernel_args import ReadMemoryArgs
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.system.processor import CPUS, last_level_cache_bytes

MIN_READ = 256 << 20
CACHES_READ = 4
"""How many times the cache size must be read cyclically so that cache hits are negligible. At twice the size,
a cache with random eviction still hits a fifth; at four times, a fiftieth.
"""


def read_bandwidth(kernels: Kernels, threads: int, nbytes: int = 0, seconds: float = 0.5) -> float:
    """Bytes per second that `threads` threads read in total from `nbytes` of memory (0: more than the caches
    hold); the best run within `seconds`.
    """
    with _readers(kernels, [threads], nbytes) as (read,):
        best, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            best = max(best, read())
    return best


def usual_bandwidths(
    kernels: Kernels, counts: Sequence[int], nbytes: int = 0, seconds: float = 0.8
) -> dict[int, float]:
    """As `read_bandwidth`, but the median run, for several thread counts that alternate for `seconds` in
    total.

    Other load on the machine slows all thread counts alike, and the most affected ones show it.
    """
    with _readers(kernels, counts, nbytes) as readers:
        rates_by_count: list[list[float]] = [[] for _ in counts]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not rates_by_count[0]:
            for rates, read in zip(rates_by_count, readers, strict=True):
                read()  # Wakes its threads up.
                rates.append(read())
    return dict(zip(counts, map(median, rates_by_count), strict=True))


@contextmanager
def _readers(kernels: Kernels, counts: Sequence[int], nbytes: int) -> Iterator[list[Callable[[], float]]]:
    """For each thread count, a function that reads all memory once and returns bytes per second."""
    nbytes = nbytes or uncached_bytes()
    memory = allocate(nbytes)
    memory[:] = 1
    sums = np.zeros(8 * max(counts), np.int64)
    args = ReadMemoryArgs(nbytes=nbytes, sums=address(sums))
    pools = [ThreadPool(kernels, threads) for threads in counts]

    def reader(pool: ThreadPool) -> Callable[[], float]:
        def read() -> float:
            begin = time.perf_counter()
            pool.run(kernels.address("read_memory"), address(memory), addressof(args))
            return nbytes / (time.perf_counter() - begin)

        return read

    try:
        yield [reader(pool) for pool in pools]
    finally:
        for pool in pools:
            pool.close()


def uncached_bytes(folder: Path = CPUS, max_bytes: int | None = None) -> int:
    """An amount of memory so large that cyclic reads have negligible cache hits, at most `max_bytes` bytes,
    but at least MIN_READ.
    """
    needed = CACHES_READ * last_level_cache_bytes(folder)
    return max(MIN_READ, needed if max_bytes is None else min(needed, max_bytes))
