"""A model larger than the GPU: edgeinfer with a budget, llama-bench with the most layers that fit it."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import NOTHING, shown_rate
from edgeinfer.benchmarking.timings import MEDIAN, Timings
from edgeinfer.benchmarking.workloads import Workload, needed_context
from edgeinfer.loading.loading import load
from edgeinfer.planning.model_plan import model_sizes, plan_model
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from harness.cuda_runs import versus_cells, workload_seconds
from harness.llama_bench import LlamaBench

HEAD = (
    "model", "budget", "test", "edgeinfer", "best decile t/s", "llama.cpp", "ratio",
    "median t/s", "llama.cpp", "ratio", "planned t/s", "measured/planned", "llama.cpp's setting",
)  # fmt: skip


@dataclass(frozen=True)
class SplitRow:
    """One workload of one model at one budget; `theirs` None: without llama.cpp."""

    model: str
    budget: int
    """Bytes of weights, keys and values that may be on the GPU."""
    workload: Workload
    placed: str
    """The parts of our model on the GPU."""
    planned_rate: float
    """Predicted tokens per second."""
    ours: Timings
    theirs: Timings | None
    setting: str

    def cells(self) -> list[str]:
        """One row under HEAD."""
        cells = [self.model, f"{self.budget / 2**30:.2f} GiB", self.workload.name, self.placed]
        cells += versus_cells(self.ours, self.theirs)
        if not self.planned_rate:
            return [*cells, NOTHING, NOTHING, self.setting]
        measured_over_planned = self.ours.rate_at(MEDIAN) / self.planned_rate
        return [*cells, shown_rate(self.planned_rate), f"{measured_over_planned:.2f}", self.setting]


@dataclass(frozen=True)
class SplitSuite:
    """Models at budgets, each a share of the bytes of their weights."""

    models: Iterable[BenchedModel]
    """An iterator; read once."""
    shares: Sequence[float]
    program: Path | None
    threads: int | None
    rounds: int
    repetitions: int
    device: str

    def compare(self, workloads: Sequence[Workload]) -> Iterator[SplitRow]:
        """Every model at every budget; yields a budget's rows after its last round."""
        context = needed_context(workloads) + 1
        for model in self.models:
            sizes = model_sizes(model.path)
            reserved = overhead(model.path, context, self.device, self.threads, sizes)
            for share in self.shares:
                print(f"{model.name} at {share:.0%}", file=sys.stderr, flush=True)
                budget = int(share * sizes.nbytes)
                settings = llama_cpp_settings(sizes, context, budget) if self.program else []
                yield from self._compare(model, context, budget, reserved, settings, workloads)

    def _compare(
        self,
        model: BenchedModel,
        context: int,
        budget: int,
        reserved: int,
        settings: Sequence[Sequence[str]],
        workloads: Sequence[Workload],
    ) -> list[SplitRow]:
        """A B A B …: our first run isn't counted; a round of llama.cpp runs all its settings."""
        ours: list[list[float]] = [[] for _ in workloads]
        theirs: dict[str, list[list[float]]] = {}
        vram = budget + reserved
        with load(
            model.path, context=context, device=self.device, vram=vram, threads=self.threads, draft=None
        ) as loaded:
            plan = loaded.plan
            assert plan is not None
            for workload in workloads:
                workload_seconds(loaded, workload)
            for _ in range(self.rounds):
                for collected, workload in zip(ours, workloads, strict=True):
                    collected += [workload_seconds(loaded, workload) for _ in range(self.repetitions)]
                for setting in settings:
                    timings = self._llama_cpp_timings(model, setting, workloads)
                    all_timings = theirs.setdefault(" ".join(setting), [[] for _ in workloads])
                    for collected, timing in zip(all_timings, timings, strict=True):
                        collected += timing.seconds
        return [
            _row(
                model.name,
                budget,
                workload,
                plan,
                ours[at],
                {name: collected[at] for name, collected in theirs.items()},
            )
            for at, workload in enumerate(workloads)
        ]

    def _llama_cpp_timings(
        self, model: BenchedModel, setting: Sequence[str], workloads: Sequence[Workload]
    ) -> list[Timings]:
        assert self.program is not None
        threads = ("-t", str(self.threads)) if self.threads else ()
        return LlamaBench(self.program, (*setting, *threads)).run(model.path, workloads, self.repetitions)


def overhead(path: Path, context: int, device: str, threads: int | None, sizes: ModelSizes) -> int:
    """GPU bytes of our libraries and buffers besides weights, keys and values, for a split model and for one
    that isn't. They are added to a budget, as llama.cpp's are.
    """

    def planned(vram: int | None) -> int:
        plan = plan_model(path, context=context, device=device, threads=threads, vram=vram).plan
        return sum(
            item.bytes
            for item in plan.items
            if item.device == "gpu" and item.layer is None and item.item not in ("head", "embedding")
        )

    whole = planned(None)
    return max(whole, planned(whole + sizes.nbytes // 2))


def _row(
    model: str,
    budget: int,
    workload: Workload,
    plan: MemoryPlan,
    own: Sequence[float],
    theirs: Mapping[str, Sequence[float]],
) -> SplitRow:
    """edgeinfer against llama.cpp's setting with the fastest run."""
    setting = min(theirs, key=lambda name: min(theirs[name]), default=None)
    return SplitRow(
        model,
        budget,
        workload,
        placed(plan),
        planned_rate(plan, workload),
        Timings(tuple(own), workload.tokens),
        Timings(tuple(theirs[setting]), workload.tokens) if setting is not None else None,
        setting or NOTHING,
    )


def llama_cpp_settings(sizes: ModelSizes, context: int, budget: int) -> list[tuple[str, ...]]:
    """llama-bench options that put as much on the GPU as the budget allows: whole layers from the last
    (`-ngl`, the head being the first of them); also all layers but the experts (`-ncmoe`) or the
    feed-forwards (`-ot`) of the first ones, if that fits. Weights count with their size in the file, keys and
    values as f16, nothing else.
    """
    caches = [sum(b.state_bytes(context, "f16") for b in layer.blocks) for layer in sizes.layers]
    whole = [_nbytes(layer) + cache for layer, cache in zip(sizes.layers, caches, strict=True)]
    left, layers = budget - sizes.head.nbytes, 0
    for nbytes in reversed(whole):
        left -= nbytes
        if left < 0:
            break
        layers += 1
    settings: list[tuple[str, ...]] = [("-ngl", str(layers + 1 if budget >= sizes.head.nbytes else 0))]
    experts = [_expert_bytes(layer) for layer in sizes.layers]
    others = experts if any(experts) else [_feed_forward_bytes(layer) for layer in sizes.layers]
    left, there = budget - sizes.head.nbytes - sum(whole) + sum(others), 0
    if left < 0 or layers == len(whole):
        return settings
    for nbytes in reversed(others):
        left -= nbytes
        if left < 0:
            break
        there += 1
    on_cpu = len(others) - there
    if any(experts):
        settings.append(("-ngl", "99", "-ncmoe", str(on_cpu)))
    elif any(others) and on_cpu:
        numbers = "|".join(map(str, range(on_cpu)))
        settings.append(("-ngl", "99", "-ot", rf"blk\.({numbers})\.ffn_(gate|up|down)\.weight=CPU"))
    return settings


def _nbytes(layer: LayerSizes) -> int:
    return sum(matrix.nbytes for matrix in layer.matrices())


def _feed_forward_bytes(layer: LayerSizes) -> int:
    return layer.divisible.file_bytes if layer.divisible else 0


def _expert_bytes(layer: LayerSizes) -> int:
    return layer.routed.file_bytes if layer.routed else 0


def placed(plan: MemoryPlan) -> str:
    """The parts of a plan on the GPU, as a short text."""
    whole = sum(layer.whole_on == "gpu" for layer in plan.layers)
    attention = sum(layer.attention == "gpu" for layer in plan.layers)
    if attention == whole:
        return f"{whole} of {len(plan.layers)} layers"
    what = "experts" if any(layer.experts for layer in plan.layers) else "feed-forwards"
    return f"{attention} of {len(plan.layers)} attentions, {plan.feed_forward_share:.0%} of {what}"


def planned_rate(plan: MemoryPlan, workload: Workload) -> float:
    """Predicted tokens per second of a workload; 0 without a prediction."""
    if workload.kind == "generate":
        return plan.prediction.decode_tokens_per_second
    same = workload.kind == "prompt" and workload.tokens == plan.prediction.prompt
    return plan.prediction.prefill_tokens_per_second if same else 0.0
