"""Reading memory and nothing else: what decoding can't be faster than."""

import os
import time
from pathlib import Path

import numpy as np

from edgeinfer_kernels.cpu.features import usable_cpus
from edgeinfer_kernels.cpu.memory import address, allocate
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cpu.threads import Team

LEAST_READ = 256 << 20
CACHES = Path("/sys/devices/system/cpu")
CACHES_READ = 4
"""How many times what caches hold has to be read, again and again, so that next to nothing is found there: of
twice as much a cache that evicts at random still has a fifth, of four times a fiftieth.
"""


def read_bandwidth(kernels: Kernels, threads: int, nbytes: int = 0, seconds: float = 0.5) -> float:
    """Bytes per second that `threads` read together from `nbytes` of memory (0: more than caches hold); the
    best pass of `seconds`.
    """
    nbytes = nbytes or uncached_bytes()
    memory = allocate(nbytes)
    memory[:] = 1
    sums = np.zeros(8 * threads, np.int64)
    call = np.array([nbytes, address(sums)], np.int64)
    team = Team(kernels, threads)
    best, end = 0.0, time.perf_counter() + seconds
    try:
        while time.perf_counter() < end:
            begin = time.perf_counter()
            team.run(kernels.address("read_memory"), address(memory), address(call))
            best = max(best, nbytes / (time.perf_counter() - begin))
    finally:
        team.close()
    return best


def uncached_bytes(folder: Path = CACHES, most: int | None = None) -> int:
    """So much memory that reading it in turns finds next to nothing in this processor's caches, `most` bytes
    (but not less than LEAST_READ) at most.
    """
    wanted = CACHES_READ * last_level_bytes(folder)
    return max(LEAST_READ, wanted if most is None else min(wanted, most))


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
