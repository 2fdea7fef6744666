"""This machine for the planner: memory that is free now, with the speeds measured on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import log2
from pathlib import Path
from statistics import harmonic_mean

from edgeinfer_kernels.cpu.compiler.features import choose, detect
from edgeinfer_kernels.cpu.compiler.kernel_cache import (
    BLOCKS,
    BuildProgress,
    KernelCache,
    Kernels,
    load_kernels,
)
from edgeinfer_kernels.cpu.compiler.kernel_units import row_units
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.cpu.runtime.bandwidth import MIN_READ
from edgeinfer_kernels.cpu.runtime.kernel_speed import KernelSpeed, cached_speed, kernel_speed, step_speed
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.cuda.weights.plane_formats import TILES
from edgeinfer_offload.machine.cost_constants import CPU_BLOCK_SECONDS, LAUNCH_SECONDS, SYNC_SECONDS
from edgeinfer_offload.machine.disk_speed import disk_speed
from edgeinfer_offload.machine.graphics_cards import find_card
from edgeinfer_offload.machine.hardware import Disk, Graphics, Link, Machine, Origin, PeerSums, Processor
from edgeinfer_offload.machine.host_memory import host_memory
from edgeinfer_offload.machine.measure import measured_bandwidth, reading_bytes, stored_figures

UNKNOWN = float("inf")
"""An unmeasured speed: a plan made with it gives the placement, but no speeds."""
MEBIBYTE = 1 << 20
MIN_MEBIBYTES = 4
"""Minimum MiB of weights on which a rate is measured."""
PROMPT_SHARE = 0.5
"""Share of the speed of a float16 matmul that prefill reaches, including dequantization; an H200's."""


def unmeasured_machine(threads: int) -> Machine:
    """Free main memory of this machine; no speeds, no GPU."""
    memory = host_memory()
    processor = Processor(detect().name, threads, memory.total_bytes, memory.free_bytes, UNKNOWN, UNKNOWN)
    return Machine(processor, origin="unmeasured")


def with_cpu_speeds(
    machine: Machine,
    cache_folder: Path,
    formats: Iterable[str],
    model_bytes: int = 0,
    progress: BuildProgress | None = None,
) -> Machine:
    """The machine with its CPU speeds: memory reads, weights of these formats, and the blocks of a step.

    `model_bytes`: size of all weights. Weights of a small model stay in caches, so that amount is measured.

    Measured on first use in about a second per format, then stored. `progress` is called for kernels that
    have to be compiled for it.
    """
    threads, figures = machine.processor.threads, stored_figures(cache_folder)
    reading = measured_bandwidth(cache_folder, threads)
    requested = sorted({name for name in formats if name in FIELDS})
    known, prefix, few = figures.known(), f"{threads} threads ", _size_suffix(model_bytes)
    missing = _unknown_formats(known, requested, threads, model_bytes)
    if missing:
        kernels = load_kernels(cache_folder, choose(), row_units(missing), progress)
        figures.keep(_measured_formats(kernels, missing, threads, model_bytes, known))
        known = figures.known()
    speeds = {
        name: KernelSpeed(known[f"{prefix}{name}{few}"], known[f"{prefix}{name}{few} prompt"])
        for name in requested
    }
    products = [speed.operations_per_second for speed in speeds.values()]
    processor = replace(
        machine.processor,
        bytes_per_second=reading,
        operations_per_second=harmonic_mean(products) if products else UNKNOWN,
        kernels={name: speed.bytes_per_second for name, speed in speeds.items()},
        products={name: speed.operations_per_second for name, speed in speeds.items()},
        block_seconds=known.get(f"{prefix}block", CPU_BLOCK_SECONDS),
        token_seconds=known.get(f"{prefix}token", 0.0),
    )
    return replace(machine, processor=processor, origin="measured")


def with_disk_speed(machine: Machine, cache_folder: Path, path: Path) -> Machine:
    """The machine with the speed of the disk that has this file: measured on first use in about a second,
    then stored. Raises OSError: the file can't be read.
    """
    figures, prefix = stored_figures(cache_folder), f"disk {path.stat().st_dev} "
    known = figures.known()
    if f"{prefix}rate" not in known:
        speed = disk_speed(path)
        figures.keep({f"{prefix}rate": speed.bytes_per_second, f"{prefix}read": speed.read_seconds})
        known = figures.known()
    return replace(machine, disk=Disk(known[f"{prefix}rate"], known[f"{prefix}read"]))


def with_known_cpu_speeds(
    machine: Machine, cache_folder: Path, formats: Iterable[str], model_bytes: int
) -> Machine | None:
    """As `with_cpu_speeds`, from stored measurements only; None: a measurement is missing."""
    threads, known = machine.processor.threads, stored_figures(cache_folder).known()
    requested = [name for name in formats if name in FIELDS]
    if f"{threads} threads" not in known or _unknown_formats(known, requested, threads, model_bytes):
        return None
    return with_cpu_speeds(machine, cache_folder, requested, model_bytes)


def are_kernels_built(cache_folder: Path, formats: Iterable[str]) -> bool:
    """Whether the kernels of these formats are compiled: measuring then takes a second per format."""
    cache = KernelCache(cache_folder, choose())
    return all(cache.find(unit) is not None for unit in (BLOCKS, *row_units(formats)))


def _unknown_formats(
    known: Mapping[str, float], requested: Iterable[str], threads: int, model_bytes: int
) -> list[str]:
    """The formats for which a measurement is missing."""
    prefix, few = f"{threads} threads ", _size_suffix(model_bytes)
    return [
        name
        for name in requested
        if not {f"{prefix}{name}{few}", f"{prefix}{name}{few} prompt", f"{prefix}block"} <= known.keys()
    ]


def _size_suffix(model_bytes: int) -> str:
    """Suffix of a format's rate name for a model that may fit in caches: the amount that is read."""
    return f" of {_read_mebibytes(model_bytes)} MiB" if 0 < model_bytes < MIN_READ else ""


def _read_mebibytes(model_bytes: int) -> int:
    """A power of two, so that few model sizes are measured."""
    return int(2 ** round(log2(max(model_bytes / MEBIBYTE, MIN_MEBIBYTES))))


_SECONDS = (" block", " token")
"""Suffixes of figure names in seconds; others are rates."""


def _measured_formats(
    kernels: Kernels, names: Sequence[str], threads: int, model_bytes: int, known: Mapping[str, float]
) -> dict[str, float]:
    """Missing measurements of these formats: the better of two runs, with the other formats measured between
    them. Load from other programs only worsens a figure, and rarely in both runs.
    """
    figures: dict[str, float] = {}
    for _ in range(2):
        now = dict(known)
        for name in names:
            now |= _measured_format(kernels, name, threads, model_bytes, now)
        for name in now.keys() - known.keys():
            better = min if name.endswith(_SECONDS) else max
            figures[name] = better(now[name], figures.get(name, now[name]))
    return figures


def _measured_format(
    kernels: Kernels, name: str, threads: int, model_bytes: int, known: Mapping[str, float]
) -> dict[str, float]:
    """Missing measurements of one format, and of blocks, which don't depend on the format."""
    prefix, figures = f"{threads} threads ", dict[str, float]()
    if f"{prefix}block" not in known:
        step = step_speed(kernels, name, threads)
        figures |= {f"{prefix}block": step.block_seconds, f"{prefix}token": step.token_seconds}
    few = f"{prefix}{name}{_size_suffix(model_bytes)}"
    if f"{few} prompt" not in known:
        size = _read_mebibytes(model_bytes) * MEBIBYTE
        block_seconds = {**known, **figures}[f"{prefix}block"]
        speed = (
            cached_speed(kernels, name, threads, size)
            if _size_suffix(model_bytes)
            else kernel_speed(kernels, name, threads, reading_bytes(), block_seconds)
        )
        figures |= {few: speed.bytes_per_second, f"{few} prompt": speed.operations_per_second}
    return figures


_UNPACKED = "unpacked "
GPU_FIGURES = (
    "bytes_per_second",
    "operations_per_second",
    "to_gpu",
    "from_gpu",
    "pageable_to_gpu",
    "pageable_from_gpu",
    "sync_seconds",
    "meets_in_graph",
    "pins_in_place",
)


def with_gpu(machine: Machine, gpu: Gpu, free_bytes: int, cache_folder: Path) -> Machine:
    """The machine with a GPU and its speeds: measured before, else from its name, else none."""
    known = stored_figures(cache_folder).known()
    prefix = gpu.key
    if all(prefix + name in known for name in GPU_FIGURES):
        own = {name.removeprefix(prefix): value for name, value in known.items() if name.startswith(prefix)}
        return _measured_gpu(machine, gpu, free_bytes, own)
    card = find_card(gpu.name)
    if card is None:
        link = Link(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
        graphics = Graphics(gpu.name, gpu.index, gpu.total_bytes, free_bytes, UNKNOWN, UNKNOWN, link)
        return replace(machine.with_gpu(graphics), origin="unmeasured")
    graphics = replace(
        card.graphics(), index=gpu.index, total_bytes=gpu.total_bytes, free_bytes=free_bytes, context_bytes=0
    )
    return replace(machine.with_gpu(graphics), origin="described")


def with_gpus(
    machine: Machine, free_bytes: Mapping[Gpu, int], cache_folder: Path, peers: PeerSums | None = None
) -> Machine:
    """The machine with several GPUs, in their order, each with the speeds that `with_gpu` finds for it, and
    how they add up partial sums.
    """
    found = [with_gpu(machine, gpu, free, cache_folder) for gpu, free in free_bytes.items()]
    origins = [one.origin for one in found]
    order: tuple[Origin, ...] = ("unmeasured", "described", "measured")
    origin = next(each for each in order if each in origins)
    return replace(machine, gpus=tuple(one.gpus[0] for one in found), origin=origin, peers=peers)


def _measured_gpu(machine: Machine, gpu: Gpu, free_bytes: int, own: Mapping[str, float]) -> Machine:
    kernels = {name: value for name, value in own.items() if name in TILES}
    link = Link(
        own["to_gpu"],
        own["from_gpu"],
        own["pageable_to_gpu"],
        own["pageable_from_gpu"],
        own.get("sync_seconds", SYNC_SECONDS),
        own["pins_in_place"] > 0,
    )
    graphics = Graphics(
        gpu.name,
        gpu.index,
        gpu.total_bytes,
        free_bytes,
        own["bytes_per_second"],
        PROMPT_SHARE * own["operations_per_second"],
        link,
        own.get("launch_seconds", LAUNCH_SECONDS),
        kernels={name: min(value, own["bytes_per_second"]) for name, value in kernels.items()},
        unpacking={name: own[_UNPACKED + name] for name in TILES if _UNPACKED + name in own},
    )
    return replace(machine.with_gpu(graphics), origin="measured")


def meets_in_graph(gpu: Gpu, cache_folder: Path) -> bool:
    """Whether GPU and CPU can synchronize within a graph; assumed true until measured."""
    return stored_figures(cache_folder).known().get(f"{gpu.key}meets_in_graph", 1.0) > 0


def measure_gpu(gpu: Gpu, cache_folder: Path, formats: Iterable[str]) -> None:
    """Measure what is missing for a GPU, its link, and its kernels for these formats; imports torch."""
    figures, prefix = stored_figures(cache_folder), gpu.key
    known = figures.known()
    missing = [name for name in formats if name in TILES and f"{prefix}{_UNPACKED}{name}" not in known]
    if not missing and all(prefix + name in known for name in GPU_FIGURES):
        return
    from edgeinfer_kernels.cuda.device_parts import cuda_device
    from edgeinfer_kernels.cuda.tuning.gpu_speed import format_speed, gpu_speed

    device = cuda_device(gpu.index)
    measured = {prefix + name: value for name, value in asdict(gpu_speed(device)).items()}
    for name in missing:
        speed = format_speed(device, name)
        measured |= {
            prefix + name: speed.bytes_per_second,
            f"{prefix}{_UNPACKED}{name}": speed.unpacked_per_second,
            f"{prefix}launch_seconds": speed.launch_seconds,
        }
    figures.keep(measured)
