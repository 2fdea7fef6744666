"""Benchmark of one model: loads it with each number of threads and times each workload."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.bench_targets import BenchTarget, LlamaCppTarget, NativeTarget, bytes_per_token
from edgeinfer.benchmarking.measuring import PIECE_TOKENS, SEED, interleave, repeat
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings, speed_ratio
from edgeinfer.benchmarking.workloads import Workload, needed_context
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.registry.registry import find_model
from edgeinfer.user_folders import user_folder
from edgeinfer_offload.machine.energy import energy_meter
from edgeinfer_offload.machine.measure import read_bandwidth
from edgeinfer_offload.machine.peak_memory import peak_resident_bytes, reset_peak

Report = Callable[[str, int, int], None]
"""Called with (label, pieces done, total pieces)."""


@dataclass(frozen=True)
class BenchedModel:
    """The model file to measure."""

    name: str
    path: Path
    size_bytes: int
    parameters: int

    @classmethod
    def find(cls, model: str | Path | None) -> "BenchedModel":
        """Find a model by name or path. Raises `UnknownModelError`, `FormatError`."""
        model_file = find_model(model)
        with open_file(model_file.path) as file:
            parameters = sum(prod(info.shape) for info in file.tensors.values())
        return cls(model_file.name, model_file.path, model_file.size_bytes, parameters)


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark."""

    workloads: Sequence[Workload]
    threads: Sequence[int]
    repetitions: int = 5
    rounds: int = 10
    piece: int = PIECE_TOKENS
    warm_up: bool = True
    seed: int = SEED
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords of `edgeinfer.load`."""
    report: Report | None = None
    load_progress: tuple[Callable[[int, int], None] | None, Callable[[int, int], None] | None] = (None, None)
    """Callbacks for bytes loaded and for kernels compiled."""

    @property
    def context(self) -> int:
        """Required context in tokens."""
        return needed_context(self.workloads)

    def progress_callback(
        self, workloads: Sequence[Workload], threads: int
    ) -> Callable[[int, int], None] | None:
        """Progress callback of some workloads, labelled with their names."""
        report = self.report
        if report is None:
            return None
        label = f"{', '.join(workload.name for workload in workloads)}, {threads} threads:"
        return lambda done, total: report(label, done, total)


@dataclass(frozen=True)
class SpeedRow:
    """One workload of one model with one number of threads."""

    workload: Workload
    threads: int
    timings: Timings
    bytes_per_token: float
    """Bytes read per decoded token: weights and KV cache."""
    read_bandwidth: float
    """Read bandwidth in bytes per second with the same number of threads, measured around the run."""
    peak_resident_bytes: int

    @property
    def gigabytes_per_second(self) -> float | None:
        """Read rate of generation; None for a workload that isn't limited by bandwidth."""
        if self.workload.kind != "generate":
            return None
        return self.timings.mean_rate * self.bytes_per_token / 1e9

    @property
    def bandwidth_share(self) -> float | None:
        """Fraction of the measured read bandwidth."""
        rate = self.gigabytes_per_second
        return rate * 1e9 / self.read_bandwidth if rate is not None else None

    @property
    def seconds_to_first_token(self) -> float | None:
        """From the prompt's ids to the logits of the first completion token."""
        return self.timings.mean_seconds if self.workload.kind == "prompt" else None


@dataclass(frozen=True)
class VersusRow:
    """One workload with one number of threads, both engines interleaved."""

    workload: Workload
    threads: int
    ours: Timings
    theirs: Timings
    bytes_per_token: float
    read_bandwidth: float

    def ratio(self, share: float) -> float:
        """Our speed over theirs, at this share of the pieces."""
        return speed_ratio(self.ours, self.theirs, share)

    @property
    def best_ratio(self) -> float:
        return self.ratio(BEST_DECILE)

    @property
    def median_ratio(self) -> float:
        return self.ratio(MEDIAN)

    @property
    def gigabytes_per_second(self) -> float | None:
        """Our read rate of generation, in the best decile."""
        if self.workload.kind != "generate":
            return None
        return self.ours.rate_at(BEST_DECILE) * self.bytes_per_token / 1e9

    @property
    def bandwidth_share(self) -> float | None:
        """Fraction of the measured read bandwidth."""
        rate = self.gigabytes_per_second
        return rate * 1e9 / self.read_bandwidth if rate is not None else None


@contextmanager
def _loaded(model: BenchedModel, settings: BenchSettings, threads: int) -> Iterator[Model]:
    progress, build_progress = settings.load_progress
    with load(
        model.path,
        context=settings.context,
        threads=threads,
        draft=None,
        progress=progress,
        build_progress=build_progress,
        **settings.loading,
    ) as loaded:
        yield loaded


def _mean_bytes(loaded: Model, workload: Workload) -> float:
    return bytes_per_token(loaded.engine, workload.depth + workload.tokens / 2)


def _by_depth(workloads: Sequence[Workload]) -> list[list[Workload]]:
    groups: dict[int, list[Workload]] = {}
    for workload in workloads:
        groups.setdefault(workload.depth, []).append(workload)
    return list(groups.values())


def measure_speed(model: BenchedModel, settings: BenchSettings) -> Iterator[SpeedRow]:
    """Measure each workload, repeated; rows are yielded when a number of threads is complete.

    Raises what `edgeinfer.load` raises.
    """
    for threads in settings.threads:
        bandwidth = read_bandwidth(user_folder("cache"), threads)
        reset_peak()
        timed: list[tuple[Workload, Timings, float, int]] = []
        with _loaded(model, settings, threads) as loaded:
            meter = energy_meter(loaded.gpu)
            for workload in settings.workloads:
                timings = repeat(
                    NativeTarget(loaded.engine),
                    workload,
                    settings.repetitions,
                    settings.warm_up,
                    settings.seed,
                    settings.progress_callback([workload], threads),
                    meter,
                )
                timed.append((workload, timings, _mean_bytes(loaded, workload), peak_resident_bytes()))
        bandwidth = max(bandwidth, read_bandwidth(user_folder("cache"), threads))
        for workload, timings, nbytes, peak in timed:
            yield SpeedRow(workload, threads, timings, nbytes, bandwidth, peak)


def measure_versus(model: BenchedModel, settings: BenchSettings) -> Iterator[VersusRow]:
    """Workloads of one depth, interleaved with each other and with llama.cpp on the same file.

    Raises what `edgeinfer.load` raises, and `EdgeInferError` if llama-cpp-python isn't installed.
    """
    for threads in settings.threads:
        bandwidth = read_bandwidth(user_folder("cache"), threads)
        peer = LlamaCppTarget(
            model.path, settings.context, threads, kv=str(settings.loading.get("kv", "f16"))
        )
        timed: list[tuple[Workload, list[Timings], float]] = []
        try:
            with _loaded(model, settings, threads) as loaded:
                targets: list[BenchTarget] = [NativeTarget(loaded.engine), peer]
                for group in _by_depth(settings.workloads):
                    timings = interleave(
                        targets,
                        group,
                        settings.rounds,
                        settings.piece,
                        settings.seed,
                        settings.progress_callback(group, threads),
                    )
                    for workload, both in zip(group, timings, strict=True):
                        timed.append((workload, both, _mean_bytes(loaded, workload)))
        finally:
            peer.close()
        bandwidth = max(bandwidth, read_bandwidth(user_folder("cache"), threads))
        for workload, (ours, theirs), nbytes in timed:
            yield VersusRow(workload, threads, ours, theirs, nbytes, bandwidth)
