"""How fast the CPU's kernels go through weights of a format: the whole way of a head, from rows to logits."""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from edgeinfer_kernels.backend import LayerCache
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.bandwidth import uncached_bytes
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.one_layer import WIDTH, one_layer
from edgeinfer_quant_formats import block_format

PROMPT = 128
PROMPT_ROWS = 4096


@dataclass(frozen=True)
class KernelSpeed:
    """Bytes of weights a second for one token; operations a second for many, two for a weight and a token."""

    bytes_per_second: float
    operations_per_second: float


def kernel_speed(
    kernels: Kernels, format_name: str, threads: int, read_bytes: int = 0, seconds: float = 0.3
) -> KernelSpeed:
    """Measure both, `seconds` each, the median pass counting: what else runs here will run later too.

    `kernels`: with those of the format. `read_bytes` 0: more than caches hold.
    """
    read_bytes = read_bytes or uncached_bytes()
    rows = max(read_bytes // block_format(format_name).row_bytes(WIDTH) // 16, 1) * 16
    reading = _usual(kernels, format_name, rows, 1, threads, seconds)
    multiplying = _usual(kernels, format_name, PROMPT_ROWS, PROMPT, threads, seconds)
    nbytes = block_format(format_name).nbytes((rows, WIDTH))
    return KernelSpeed(nbytes / reading, 2 * PROMPT * PROMPT_ROWS * WIDTH / multiplying)


def _usual(kernels: Kernels, format_name: str, rows: int, tokens: int, threads: int, seconds: float) -> float:
    """Seconds of the median pass of `tokens` through a head of `rows`; the first one isn't counted."""
    specification, weights = one_layer(format_name, rows)
    cache = LayerCache.allocate(specification.layers[0].attention, 16, "f16")
    backend = CpuBackend(specification, weights, [cache], kernels, batch=tokens, threads=threads)
    passes: list[float] = []
    try:
        x = np.ones((tokens, WIDTH), np.float32)
        backend.logits(x)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not passes:
            begin = time.perf_counter()
            backend.logits(x)
            passes.append(time.perf_counter() - begin)
    finally:
        backend.close()
    return median(passes)
