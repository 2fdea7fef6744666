"""Speed on a GPU: edgeinfer through its public API and llama-bench on the same file, alternating."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.bench_targets import bytes_per_token
from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.measuring import SEED
from edgeinfer.benchmarking.random_files import random_file
from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import NOTHING, markdown, shown_rate
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings, speed_ratio
from edgeinfer.benchmarking.workloads import Workload, needed_context, random_ids
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer_kernels.cuda.driver import list_gpus
from harness import suites
from harness.llama_bench import LlamaBench

HEAD = (
    "model", "test", "best decile t/s", "llama.cpp", "ratio", "median t/s", "llama.cpp", "ratio", "GB/s"
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One workload of one model; `theirs` None: without llama.cpp."""

    model: str
    workload: Workload
    ours: Timings
    theirs: Timings | None
    bytes_per_token: float
    """Bytes that a decoded token reads: weights, keys and values."""

    def cells(self) -> list[str]:
        """One row under HEAD."""
        cells = [self.model, self.workload.name, *versus_cells(self.ours, self.theirs)]
        decoding = self.workload.kind == "generate"
        rate = self.ours.rate_at(MEDIAN) * self.bytes_per_token / 1e9
        return [*cells, f"{rate:.0f}" if decoding else NOTHING]


@dataclass(frozen=True)
class CudaSuite:
    """One run of a program in benchmarks/ about a GPU."""

    models: tuple[str, ...]
    shapes: tuple[str, ...]
    types: tuple[str, ...]
    bench: LlamaBench | None
    rounds: int
    repetitions: int
    device: str
    kv: str

    def compare(self, workloads: Sequence[Workload]) -> Iterator[Comparison]:
        """Run the workloads with every model; yields a model's rows after its last round."""
        for model in self.benched_models():
            for comparison in self._compare(model, workloads):
                print(" | ".join(comparison.cells()), file=sys.stderr, flush=True)
                yield comparison

    def benched_models(self) -> Iterator[BenchedModel]:
        """The named models, else every shape in every type, written when needed."""
        if self.models:
            yield from map(BenchedModel.find, self.models)
            return
        for shape in self.shapes:
            for kind in self.types:
                yield BenchedModel.find(random_file(shape, kind))

    def _compare(self, model: BenchedModel, workloads: Sequence[Workload]) -> list[Comparison]:
        """A B A B …: in each round each engine runs all workloads; our first run isn't counted."""
        ours: list[list[float]] = [[] for _ in workloads]
        theirs: list[list[float]] = [[] for _ in workloads]
        context = needed_context(workloads) + 1
        # With a drafter, steps of every token count are captured.
        draft = "lookup" if any(each.kind == "verify" for each in workloads) else None
        settings: dict[str, Any] = {"device": self.device, "kv": self.kv, "draft": draft}
        with load(model.path, context=context, **settings) as loaded:
            read = [bytes_per_token(loaded.engine, each.depth + each.tokens / 2) for each in workloads]
            loaded.speculator = None
            for workload in workloads:
                workload_seconds(loaded, workload)
            for _ in range(self.rounds):
                if self.bench is not None:
                    timings = self.bench.run(model.path, workloads, self.repetitions)
                    for collected, timing in zip(theirs, timings, strict=True):
                        collected += timing.seconds
                for collected, workload in zip(ours, workloads, strict=True):
                    collected += [workload_seconds(loaded, workload) for _ in range(self.repetitions)]
        return [
            Comparison(
                model.name,
                workload,
                Timings(tuple(own), workload.tokens),
                Timings(tuple(other), workload.tokens) if other else None,
                nbytes,
            )
            for workload, own, other, nbytes in zip(workloads, ours, theirs, read, strict=True)
        ]


def versus_cells(ours: Timings, theirs: Timings | None) -> list[str]:
    """Our rate, theirs and the ratio, at the best decile and at the median."""
    cells = []
    for share in (BEST_DECILE, MEDIAN):
        cells.append(shown_rate(ours.rate_at(share)))
        if theirs is None:
            cells += [NOTHING, NOTHING]
        else:
            cells += [shown_rate(theirs.rate_at(share)), f"{speed_ratio(ours, theirs, share):.2f}x"]
    return cells


def workload_seconds(model: Model, workload: Workload) -> float:
    """Seconds of a workload with a loaded model.

    Generation uses `stream`, including greedy sampling, text and Python. It is timed from the second token
    on, because the first ends prefill. A completion that ends early counts by its mean.
    """
    ids = random_ids(workload.context, model.engine.vocabulary_size, SEED)
    if workload.kind == "generate":
        begin, count = 0.0, -1
        prompt = ids[: max(1, workload.depth)]
        for _ in model.stream(prompt, max_tokens=workload.tokens + 1, temperature=0.0):
            count += 1
            if count == 0:
                begin = time.perf_counter()
        if count < 1:
            raise EdgeInferError(f"{model.name}: the completion ended with its first token, nothing to time")
        return (time.perf_counter() - begin) / count * workload.tokens
    engine = model.engine
    engine.rewind(min(workload.depth, len(engine.ids)))
    if engine.ids != ids[: workload.depth]:
        engine.rewind(0)
        if workload.depth:
            engine.append(ids[: workload.depth])
    fresh = ids[workload.depth :][: workload.tokens]
    begin = time.perf_counter()
    if workload.kind == "prompt":
        engine.append(fresh)
    else:
        engine.append_all(fresh)
    return time.perf_counter() - begin


def table(comparisons: Sequence[Comparison]) -> str:
    """Comparisons in Markdown."""
    return markdown(HEAD, [each.cells() for each in comparisons], left=(0, 1))


def widths_table(comparisons: Sequence[Comparison]) -> str:
    """t(n)/t(1) of verifying n tokens, for each model and side; medians."""
    sides: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for each in comparisons:
        width = each.workload.tokens
        for name, timings in (("edgeinfer", each.ours), ("llama.cpp", each.theirs)):
            if timings is not None:
                sides.setdefault((each.model, name), []).append((width, timings.seconds_at(MEDIAN)))
    widths = sorted({each.workload.tokens for each in comparisons})
    rows = []
    for (model, name), pairs in sides.items():
        seconds = dict(pairs)
        cells = [f"{seconds[width] / seconds[widths[0]]:.2f}" for width in widths]
        rows.append([model, name, f"{seconds[widths[0]] * 1e3:.3f} ms", *cells])
    head = ["model", "engine", f"t({widths[0]})", *(f"t({width})/t({widths[0]})" for width in widths)]
    return markdown(head, rows, left=(0, 1))


def parser(description: str) -> argparse.ArgumentParser:
    """The shared options."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, built for this GPU")
    made.add_argument("--models", help="names or paths with commas, instead of shapes and types")
    made.add_argument("--shapes", default="llama-3-8b,llama-3.2-1b", help="with commas (%(default)s)")
    made.add_argument("--types", default="Q4_0,Q4_K_M,Q8_0", help="with commas (%(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    made.add_argument("--repetitions", type=int, default=5, help="runs per round (%(default)s)")
    made.add_argument("--device", help="device of edgeinfer (cuda; with --smoke auto)")
    made.add_argument("--kv", default="f16", help="KV cache type of edgeinfer (%(default)s)")
    made.add_argument(
        "--smoke",
        action="store_true",
        help="the built-in model, a few seconds, to check that the program runs",
    )
    made.add_argument("--out", type=Path, help="write the tables to this file too")
    return made


def suite(options: argparse.Namespace) -> CudaSuite:
    """The suite for these options."""
    device = options.device or ("auto" if options.smoke else "cuda")
    layers = ("-ngl", "0") if device == "cpu" else ("-ngl", "99")
    bench = LlamaBench(options.llama_bench, layers) if options.llama_bench else None
    models = ("tiny",) if options.smoke else suites.words(options.models)
    rounds, repetitions = (1, 2) if options.smoke else (options.rounds, options.repetitions)
    shapes, types = suites.words(options.shapes), suites.words(options.types)
    return CudaSuite(models, shapes, types, bench, rounds, repetitions, device, options.kv)


def gpu_name() -> str:
    """The first GPU, "none" without one."""
    gpus = list_gpus()
    return gpus[0].name if gpus else "none"


def publish(
    title: str, device: str, suite: CudaSuite, sections: Sequence[tuple[str, str]], out: Path | None
) -> None:
    """Print headed tables with machine, GPU and command; into `out` as well."""
    facts = [f"GPU: {device}", *this_machine(command_line()).lines()]
    if suite.bench is not None:
        facts.append(f"llama.cpp: {suite.bench.described}")
    suites.write_report(title, facts, sections, out)
