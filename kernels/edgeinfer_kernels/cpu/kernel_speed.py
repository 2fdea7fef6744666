"""How fast the CPU's kernels go through weights of a format: the whole way of a head, from rows to logits."""

import time
from dataclasses import dataclass

import numpy as np

from edgeinfer_kernels.backend import LayerCache
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.one_layer import WIDTH, one_layer
from edgeinfer_quant_formats import block_format

PROMPT = 128
PROMPT_ROWS = 4096
READ_BYTES = 192 << 20
"""More than caches hold."""


@dataclass(frozen=True)
class KernelSpeed:
    """Bytes of weights a second for one token; operations a second for many, two for a weight and a token."""

    bytes_per_second: float
    operations_per_second: float


def kernel_speed(
    kernels: Kernels, format_name: str, threads: int, read_bytes: int = READ_BYTES, seconds: float = 0.3
) -> KernelSpeed:
    """Measure both, `seconds` each, the best pass counting. `kernels`: with those of the format."""
    rows = max(read_bytes // block_format(format_name).row_bytes(WIDTH) // 16, 1) * 16
    reading = _best(kernels, format_name, rows, 1, threads, seconds)
    multiplying = _best(kernels, format_name, PROMPT_ROWS, PROMPT, threads, seconds)
    nbytes = block_format(format_name).nbytes((rows, WIDTH))
    return KernelSpeed(nbytes / reading, 2 * PROMPT * PROMPT_ROWS * WIDTH / multiplying)


def _best(kernels: Kernels, format_name: str, rows: int, tokens: int, threads: int, seconds: float) -> float:
    """Seconds of the fastest pass of `tokens` through a head of `rows`."""
    specification, weights = one_layer(format_name, rows)
    cache = LayerCache.allocate(specification.layers[0].attention, 16, "f16")
    backend = CpuBackend(specification, weights, [cache], kernels, batch=tokens, threads=threads)
    best, end = float("inf"), time.perf_counter() + seconds
    try:
        x = np.ones((tokens, WIDTH), np.float32)
        while time.perf_counter() < end or best == float("inf"):
            begin = time.perf_counter()
            backend.logits(x)
            best = min(best, time.perf_counter() - begin)
    finally:
        backend.close()
    return best
