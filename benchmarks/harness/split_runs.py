"""A model that is larger than the GPU: ours with a budget, llama-bench with the most that fits the same."""

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
from harness.cuda_runs import own_seconds, versus_cells
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
    """What of ours is there."""
    planned_rate: float
    """Tokens per second that the plan promises."""
    ours: Timings
    theirs: Timings | None
    setting: str

    def cells(self) -> list[str]:
        """One row under HEAD."""
        cells = [self.model, f"{self.budget / 2**30:.2f} GiB", self.workload.name, self.placed]
        cells += versus_cells(self.ours, self.theirs)
        if not self.planned_rate:
            return [*cells, NOTHING, NOTHING, self.setting]
        kept_promise = self.ours.rate_at(MEDIAN) / self.planned_rate
        return [*cells, shown_rate(self.planned_rate), f"{kept_promise:.2f}", self.setting]


@dataclass(frozen=True)
class SplitSuite:
    """Models through budgets, each a share of the bytes of their weights."""

    models: Iterable[BenchedModel]
    """Gone through once."""
    shares: Sequence[float]
    program: Path | None
    threads: int | None
    rounds: int
    repetitions: int
    device: str

    def compare(self, workloads: Sequence[Workload]) -> Iterator[SplitRow]:
        """Every model at every budget; a budget's rows come when its rounds are over."""
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
        """A B A B …: the first run of ours isn't counted; llama.cpp has all its settings in a round."""
        ours: list[list[float]] = [[] for _ in workloads]
        theirs: dict[str, list[list[float]]] = {}
        vram = budget + reserved
        with load(
            model.path, context=context, device=self.device, vram=vram, threads=self.threads, draft=None
        ) as loaded:
            plan = loaded.plan
            assert plan is not None
            for workload in workloads:
                own_seconds(loaded, workload)
            for _ in range(self.rounds):
                for kept, workload in zip(ours, workloads, strict=True):
                    kept += [own_seconds(loaded, workload) for _ in range(self.repetitions)]
                for setting in settings:
                    timings = self._their_timings(model, setting, workloads)
                    all_kept = theirs.setdefault(" ".join(setting), [[] for _ in workloads])
                    for kept, timing in zip(all_kept, timings, strict=True):
                        kept += timing.seconds
        return [
            _row(
                model.name,
                budget,
                workload,
                plan,
                ours[at],
                {name: kept[at] for name, kept in theirs.items()},
            )
            for at, workload in enumerate(workloads)
        ]

    def _their_timings(
        self, model: BenchedModel, setting: Sequence[str], workloads: Sequence[Workload]
    ) -> list[Timings]:
        assert self.program is not None
        threads = ("-t", str(self.threads)) if self.threads else ()
        return LlamaBench(self.program, (*setting, *threads)).run(model.path, workloads, self.repetitions)


def overhead(path: Path, context: int, device: str, threads: int | None, sizes: ModelSizes) -> int:
    """What our libraries and buffers take of a GPU besides weights, keys and values, for a model that is
    split or not. It comes on top of a budget, as llama.cpp's do.
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
    """Ours against the setting of llama.cpp with the fastest run."""
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
    """llama-bench's options that put as much on the GPU as the budget holds: whole layers from the last
    (`-ngl`, the head being the first of them); of a MoE also all layers but the experts of some
    (`-ncmoe`). Weights count as they lie in the file, keys and values as f16, nothing else at all.
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
    left = budget - sizes.head.nbytes - sum(whole) + sum(experts)
    if any(experts) and left >= 0:
        there = 0
        for nbytes in reversed(experts):
            left -= nbytes
            if left < 0:
                break
            there += 1
        settings.append(("-ngl", "99", "-ncmoe", str(len(experts) - there)))
    return settings


def _nbytes(layer: LayerSizes) -> int:
    return sum(matrix.nbytes for matrix in layer.matrices())


def _expert_bytes(layer: LayerSizes) -> int:
    return layer.routed.file_bytes if layer.routed else 0


def placed(plan: MemoryPlan) -> str:
    """What of a plan is on the GPU, in a few words."""
    whole = sum(layer.whole_on == "gpu" for layer in plan.layers)
    attention = sum(layer.attention == "gpu" for layer in plan.layers)
    if attention == whole:
        return f"{whole} of {len(plan.layers)} layers"
    what = "experts" if any(layer.experts for layer in plan.layers) else "feed-forwards"
    return f"{attention} of {len(plan.layers)} attentions, {plan.feed_forward_share:.0%} of {what}"


def planned_rate(plan: MemoryPlan, workload: Workload) -> float:
    """Tokens per second of a workload as the plan predicts them; 0 where it predicts none."""
    if workload.kind == "generate":
        return plan.prediction.decode_tokens_per_second
    same = workload.kind == "prompt" and workload.tokens == plan.prediction.prompt
    return plan.prediction.prefill_tokens_per_second if same else 0.0
