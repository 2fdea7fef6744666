"""Measures the throughput of the CPU kernels for weights of a format, through whole layers."""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.runtime.bandwidth import uncached_bytes
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.one_layer import NARROW, WIDTH, narrow_layers, one_layer, wide_layers
from edgeinfer_quant_formats import block_format

PROMPT = 128
PROMPT_ROWS = 4096
LAYERS = 2, 12
"""Layer counts of two small decoders whose time difference is the cost of layers."""
FIRST = 2
"""Warm-up forwards, which are not counted."""


@dataclass(frozen=True)
class KernelSpeed:
    """Bytes of weights per second for one token; operations per second for many tokens, two per weight and
    token.
    """

    bytes_per_second: float
    operations_per_second: float


def kernel_speed(
    kernels: Kernels,
    format_name: str,
    threads: int,
    read_bytes: int = 0,
    block_seconds: float = 0.0,
    seconds: float = 0.15,
) -> KernelSpeed:
    """Measure both, `seconds` each. The median forward counts, because other load here will also be present
    later.

    Reading is measured on whole layers, including the barriers and their delays, minus the time of the blocks
    without reading (`StepSpeed.block_seconds`). `kernels`: must include those of the format. `read_bytes` 0:
    more than the caches hold.
    """
    wide = wide_layers(format_name, read_bytes or uncached_bytes())
    specification, weights = wide
    whole = median(_forwards(wide, kernels, 1, threads, seconds, whole=True))
    reading = max(whole - 2 * len(specification.layers) * block_seconds, whole / 2)
    multiplying = median(_forwards(one_layer(format_name, PROMPT_ROWS), kernels, PROMPT, threads, seconds))
    nbytes = sum(matrix.nbytes for matrix in weights.matrices(head=False))
    return KernelSpeed(nbytes / reading, 2 * PROMPT * PROMPT_ROWS * WIDTH / multiplying)


def cached_speed(
    kernels: Kernels, format_name: str, threads: int, read_bytes: int, seconds: float = 0.1
) -> KernelSpeed:
    """The same for a model so small that caches hold a part of it, with narrow rows: reading without start-up
    costs, prompts with all work of a layer.
    """
    few, many = (
        median(
            _forwards(narrow_layers(format_name, 16, layers), kernels, PROMPT, threads, seconds, whole=True)
        )
        for layers in LAYERS
    )
    _, weights = narrow_layers(format_name, 16, 1)
    operations = 2 * PROMPT * sum(matrix.rows * matrix.columns for matrix in weights.matrices(head=False))
    multiplying = max(many - few, 1e-9) / (LAYERS[1] - LAYERS[0])
    return KernelSpeed(
        _cached_reading(kernels, format_name, threads, read_bytes, seconds), operations / multiplying
    )


def _cached_reading(
    kernels: Kernels, format_name: str, threads: int, read_bytes: int, seconds: float
) -> float:
    """Bytes per second when reading `read_bytes` bytes of narrow rows."""
    row_bytes = block_format(format_name).row_bytes(NARROW)
    rows = max(read_bytes // row_bytes // 16, 2) * 16
    few, many = (
        _percentile_25(_forwards(narrow_layers(format_name, count, 1), kernels, 1, threads, seconds))
        for count in (16, rows)
    )
    return (rows - 16) * row_bytes / max(many - few, 1e-9)


@dataclass(frozen=True)
class StepSpeed:
    """Time of a token without reading weights: seconds for each of a layer's two blocks, with the barriers
    between phases; and once per token, for entering and leaving the kernels.
    """

    block_seconds: float
    token_seconds: float


def step_speed(kernels: Kernels, format_name: str, threads: int, seconds: float = 0.1) -> StepSpeed:
    """Measure both on a few narrow layers that fit in the caches."""
    few, many = (
        _percentile_25(
            _forwards(narrow_layers(format_name, 16, layers), kernels, 1, threads, seconds, whole=True)
        )
        for layers in LAYERS
    )
    _, weights = narrow_layers(format_name, 16, 1)
    nbytes = sum(matrix.nbytes for matrix in weights.matrices(head=False))
    reading = nbytes / _cached_reading(kernels, format_name, threads, LAYERS[1] * nbytes, seconds)
    layer = (many - few) / (LAYERS[1] - LAYERS[0])
    return StepSpeed(max(layer - reading, 0.0) / 2, max(few - LAYERS[0] * layer, 0.0))


def _percentile_25(forwards: list[float]) -> float:
    """The 25th percentile, because a preempted thread multiplies the time of short forwards."""
    return sorted(forwards)[len(forwards) // 4]


def _forwards(
    decoder: tuple[DecoderSpec, DecoderWeights],
    kernels: Kernels,
    tokens: int,
    threads: int,
    seconds: float,
    whole: bool = False,
) -> list[float]:
    """Seconds of each forward of `tokens` through the head, or through the `whole` decoder, or several
    through its layers alone; warm-up forwards are not counted.
    """
    specification, weights = decoder
    state = DecoderState.allocate(specification, PROMPT, "f16")
    backend = CpuBackend(specification, weights, state, kernels, CpuOptions(tokens, threads))
    x = np.ones((tokens, specification.hidden_size), np.float32)
    forwards: list[float] = []
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(forwards) <= FIRST:
            begin = time.perf_counter()
            if whole and tokens > 1:
                backend.forward(x, 0)
            elif whole:
                backend.step_logits([0], 0)
            else:
                backend.logits(x)
            forwards.append(time.perf_counter() - begin)
    finally:
        backend.close()
    return forwards[FIRST:]
