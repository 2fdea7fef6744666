"""A planted model larger than the GPU: our dense split, our sparse splits, and llama.cpp, in turns."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.bench_targets import wait_until_idle
from edgeinfer.benchmarking.tables import NOTHING
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings, speed_ratio
from edgeinfer.benchmarking.workloads import Workload, random_ids
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.options.load_options import Sparse
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer.profiling.predictor_training import TrainedPredictor
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness.budget_runs import WARM_UP, token_times
from harness.cuda_runs import workload_seconds
from harness.hot_neurons.planted_files import PlantedFile
from harness.hot_neurons.quality import START, Agreement, Logits, MeasuredActivity, agreement, forced, greedy
from harness.hot_neurons.quality import measured_activity as activity_of
from harness.hot_neurons.time_split import TimeSplit, time_split
from harness.llama_bench import LlamaBench
from harness.split_runs import llama_cpp_settings, overhead, placed

WAYS: tuple[Sparse, ...] = ("off", "exact", "predicted")
EXPERT_WAYS: tuple[Sparse, ...] = ("off", "exact")
NAMES = {"off": "dense", "exact": "exact", "predicted": "predicted"}
PROMPT = 256
ALONE_ROUNDS = 10
HEAD = (
    "model", "active", "budget", "threads", "way", "on the GPU", "best decile ms", "median ms", "of dense",
    "of dense, median", "llama.cpp's best", "ratio", "ratio, median", "planned ms", "measured/planned",
    "planned GPU + CPU + exchange", "GPU alone ms", "CPU alone ms", "prompt t/s",
    "KL", "same best", "max distance",
)  # fmt: skip
REFERENCE_HEAD = (
    "model", "active, planted", "measured", "hottest 26 % cover", "predictor's recall", "it names",
    "exact on the CPU: KL", "same best", "max distance",
)  # fmt: skip
LLAMA_HEAD = ("model", "budget", "threads", "setting", "best decile ms", "median ms")


@dataclass(frozen=True)
class Run:
    """The settings of all cases."""

    program: Path | None
    device: str
    rounds: int
    tokens: int
    """Timed tokens of a round."""
    checked: int
    """Tokens whose logits are compared."""


@dataclass(frozen=True)
class Reference:
    """The dense model on the CPU alone: greedy tokens, their logits and activity; and exact mode there, if it
    was checked.
    """

    ids: list[int]
    logits: Logits
    activity: MeasuredActivity
    exact: Agreement | None


def reference(
    file: PlantedFile, trained: TrainedPredictor, run: Run, threads: int, *, with_exact: bool
) -> Reference:
    """The dense model of a planted file."""
    options: dict[str, Any] = {"device": "cpu", "threads": threads, "draft": None, "context": run.checked + 8}
    with load(file.path, sparse="off", **options) as model:
        ids, logits = greedy(model, run.checked)
        activity = activity_of(model, ids[:32], trained)
    exact = None
    if with_exact:
        with load(file.path, sparse="exact", **options) as model:
            exact = agreement(forced(model, ids), logits)
    return Reference(ids, logits, activity, exact)


def reference_cells(file: PlantedFile, active: float, found: Reference) -> list[str]:
    """One row under REFERENCE_HEAD."""
    seen = found.activity
    shares = (seen.active, seen.hot_cover, seen.recall, seen.named)
    exact = found.exact.cells() if found.exact else [NOTHING] * 3
    cells = [NOTHING if math.isnan(share) else f"{share:.1%}" for share in shares]
    return [file.shape.name, f"{active:.0%}", *cells, *exact]


@dataclass
class Measured:
    """One way of one case."""

    way: Sparse
    model: Model
    seconds: list[float] = field(default_factory=list)
    quality: Agreement | None = None
    alone: tuple[float, float] | None = None
    """Seconds of the GPU's and the CPU's part of a token, each without the other; None: not split."""
    prompt_rate: float = 0.0
    split: TimeSplit | None = None
    """How a token's time divides; None: not measured."""

    @property
    def plan(self) -> MemoryPlan:
        assert self.model.plan is not None
        return self.model.plan

    @property
    def timings(self) -> Timings:
        return Timings(tuple(self.seconds))


@dataclass(frozen=True)
class Case:
    """A planted activity of a file, at a budget with a number of threads."""

    file: PlantedFile
    active: float
    share: float
    threads: int

    @property
    def begin(self) -> list[str]:
        """The first cells of a row."""
        return [self.file.shape.name, f"{self.active:.0%}", f"{self.share:.0%}", str(self.threads)]

    def compare(
        self, run: Run, known: Reference | None, theirs: dict[tuple[str, ...], list[float]]
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Rows under HEAD, and those under TIME_HEAD. A B A B …: each way, then llama.cpp, in the first round
        in all its settings, then in the fastest. `theirs`: seconds of a token by setting, as far as measured;
        they don't depend on the activity.
        """
        context, path = max(run.checked, PROMPT + run.tokens) + 40, self.file.path
        sizes = model_sizes(path)
        budget = int(self.share * sizes.nbytes)
        options: dict[str, Any] = {"device": run.device, "context": context, "threads": self.threads}
        if run.device != "cpu":
            options["vram"] = budget + overhead(path, context, run.device, self.threads, sizes)
        settings = llama_cpp_settings(sizes, context, budget) if run.program and not theirs else []
        with ExitStack() as stack:
            ways = [
                Measured(way, stack.enter_context(load(path, sparse=way, draft=None, **options)))
                for way in (EXPERT_WAYS if self.file.shape.experts else WAYS)
            ]
            ids = random_ids(WARM_UP + run.tokens, sizes.vocabulary, 1)
            for _ in range(run.rounds):
                for way in ways:
                    wait_until_idle()
                    way.seconds += token_times(way.model, ids)[WARM_UP:]
                for setting in settings:
                    theirs.setdefault(setting, []).extend(self._llama_cpp(run, setting))
                settings = sorted(settings, key=lambda setting: min(theirs[setting]))[:1]
            for way in ways:
                _finish(way, known, ids)
        best = min(theirs.values(), key=min, default=None)
        other = Timings(tuple(best)) if best else None
        rows = [[*self.begin, *_cells(way, ways[0].timings, other)] for way in ways]
        return rows, [[*self.begin, NAMES[way.way], *way.split.cells()] for way in ways if way.split]

    def _llama_cpp(self, run: Run, setting: Sequence[str]) -> list[float]:
        assert run.program is not None
        bench = LlamaBench(run.program, (*setting, "-t", str(self.threads)))
        (timings,) = bench.run(self.file.path, [Workload("generate", run.tokens)], 2)
        return [seconds / run.tokens for seconds in timings.seconds]


def setting_cells(case: Case, theirs: dict[tuple[str, ...], list[float]]) -> list[list[str]]:
    """Rows under LLAMA_HEAD."""
    name, _, budget, threads = case.begin
    return [
        [name, budget, threads, " ".join(setting), *_ms(Timings(tuple(seconds)))]
        for setting, seconds in theirs.items()
    ]


def _finish(way: Measured, known: Reference | None, ids: Sequence[int]) -> None:
    """Measure what needs no turns: the logits, the CPU's part alone, a prompt, and how a token's time
    divides.
    """
    if known is not None:
        way.quality = agreement(forced(way.model, known.ids), known.logits)
    prompt = Workload("prompt", PROMPT)
    workload_seconds(way.model, prompt)
    way.prompt_rate = PROMPT / min(workload_seconds(way.model, prompt) for _ in range(2))
    backend = getattr(way.model.engine, "backend", None)
    if isinstance(backend, SplitBackend):
        way.alone = seconds_alone(backend)
    gpu_alone = way.alone[0] if way.alone else None
    way.split = time_split(way.model, ids, gpu_alone)


class _NoHost:
    """A CPU shard that has always finished: the GPU doesn't wait for it."""

    def __init__(self, exchange_buffer: Any) -> None:
        self._exchange_buffer = exchange_buffer

    def serve(self, tokens: int, start: int) -> None:
        self._exchange_buffer.open()

    def run_stage(self, stage: int, tokens: int, start: int) -> None:
        return


def seconds_alone(backend: SplitBackend) -> tuple[float, float]:
    """Seconds of the GPU's and of the CPU's part of a token at the first position, each without the other."""
    steps, times = backend.gpu_shard.steps, list[float]()
    host, exchange = steps.host, steps.step.exchange
    assert exchange is not None
    steps.host = _NoHost(exchange.exchange_buffer)
    try:
        for _ in range(ALONE_ROUNDS):
            begin = time.perf_counter()
            backend.gpu_shard.enter([START], 0)
            times.append(time.perf_counter() - begin)
    finally:
        steps.host = host
    return min(times), min(backend.cpu_shard.seconds_alone() for _ in range(ALONE_ROUNDS))


def _ms(timings: Timings) -> list[str]:
    return [f"{1000 * timings.seconds_at(share):.3f}" for share in (BEST_DECILE, MEDIAN)]


def _cells(way: Measured, dense: Timings, theirs: Timings | None) -> list[str]:
    """The cells of a row after the case."""
    timings, plan = way.timings, way.plan
    planned = 1000 * plan.prediction.seconds_empty
    ratios = [f"{speed_ratio(timings, dense, share):.2f}x" for share in (BEST_DECILE, MEDIAN)]
    parts = [sum(item.ms_per_token for item in plan.items if item.device == name)
             for name in ("gpu", "cpu", "link")]  # fmt: skip
    versus = [NOTHING] * 3
    if theirs:
        versus = [f"{speed_ratio(timings, theirs, share):.2f}x" for share in (BEST_DECILE, MEDIAN)]
        versus = [_ms(theirs)[0], *versus]
    measured = f"{1000 * timings.seconds_at(MEDIAN) / planned:.2f}" if planned else NOTHING
    alone = [f"{1000 * seconds:.3f}" for seconds in way.alone] if way.alone else [NOTHING, NOTHING]
    quality = way.quality.cells() if way.quality else [NOTHING] * 3
    return [
        NAMES[way.way], placed(plan), *_ms(timings), *ratios, *versus, f"{planned:.3f}", measured,
        " + ".join(f"{part:.2f}" for part in parts), *alone,
        f"{way.prompt_rate:.0f}", *quality,
    ]  # fmt: skip
