"""Measures how fast a file is read past the page cache, with dozens of reads in flight."""

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from edgeinfer_kernels.cpu.disk.bundle_layout import SECTOR_BYTES
from edgeinfer_kernels.cpu.disk.disk_reader import READ_THREADS
from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.system.direct_files import can_read_directly, open_direct, read_at
from edgeinfer_offload.machine.hardware import Disk

LARGE_BYTES, SMALL_BYTES = 1 << 20, 4096
SECONDS = 0.3
"""Of each of the two measurements."""
MAX_RATE = 1e12


def disk_speed(path: Path, seconds: float = SECONDS) -> Disk:
    """The disk with this file; that of the constants if the file is small or the system has no pread."""
    if not can_read_directly() or path.stat().st_size < 2 * LARGE_BYTES:
        return Disk()
    with _opened(path) as file:
        large = _reads_per_second(file, LARGE_BYTES, 8, seconds)
        small = _reads_per_second(file, SMALL_BYTES, READ_THREADS, seconds)
    rate = min(MAX_RATE, large * LARGE_BYTES)
    return Disk(rate, max(0.0, 1 / small - SMALL_BYTES / rate))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = open_direct(path, SECTOR_BYTES)
    try:
        yield file
    finally:
        os.close(file)


def _reads_per_second(file: int, nbytes: int, threads: int, seconds: float) -> float:
    """Reads of `nbytes` at random offsets that `threads` threads finish in a second."""
    places = max(1, (os.fstat(file).st_size - nbytes) // SMALL_BYTES)
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        counts = list(
            pool.map(lambda seed: _read(file, nbytes, places, seed, begin + seconds), range(threads))
        )
    return max(1, sum(counts)) / (time.perf_counter() - begin)


def _read(file: int, nbytes: int, places: int, seed: int, end: float) -> int:
    """Read until `end`; return the number of reads."""
    choose, done = random.Random(seed), 0
    target = allocate(nbytes).data.cast("B")[:nbytes]
    while time.perf_counter() < end:
        read_at(file, target, choose.randrange(places) * SMALL_BYTES)
        done += 1
    return done
