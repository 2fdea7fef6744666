"""A model through budgets of GPU memory: what it takes, and how fast it is, against what was planned.

What libraries and the driver take isn't seen here: a process loads them once, with the first model. The plan
has an item for them, which is left out of both sides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.benchmarking.cuda_runs import own_seconds
from edgeinfer.benchmarking.split_runs import placed
from edgeinfer.benchmarking.tables import NOTHING
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading.loading import load
from edgeinfer.planning import plan_model
from edgeinfer_kernels.cuda.device_work import MemoryMark
from edgeinfer_offload.memory_plan import MemoryPlan

HEAD = (
    "model", "budget", "share", "placed", "planned MiB", "held MiB", "planned/held", "at most MiB", "kept",
    "tokens/s", "planned", "prompt tokens/s", "planned",
)  # fmt: skip
MIB = 1 << 20
MOST_OVER, SLACK = 1.01, 8 * MIB
"""What is held may be so much of what was planned, and kernels that a process compiles late."""


@dataclass(frozen=True)
class BudgetRow:
    """One budget of one model: bytes of GPU memory that were `held` when it was loaded, and `at_most`, while
    it was; rates in tokens per second. `failure`: why there is no model; all that was measured is 0 then.
    """

    model: str
    budget: int
    share: float
    plan: MemoryPlan | None
    held: int
    at_most: int
    rate: float
    prompt_rate: float
    failure: str = ""

    @property
    def planned(self) -> int:
        """Bytes on the GPU but those of libraries and of the driver."""
        items = self.plan.items if self.plan else ()
        return sum(
            item.bytes
            for item in items
            if item.device == "gpu" and item.item not in ("loading, then libraries", "CUDA context")
        )

    @property
    def is_kept(self) -> bool:
        """Whether it was loaded, holds what was planned, and never took more than it may."""
        return (
            not self.failure and self.held <= MOST_OVER * self.planned + SLACK and self.at_most <= self.budget
        )

    def cells(self) -> list[str]:
        """One row under HEAD."""
        begin = [self.model, f"{self.budget / MIB:.0f} MiB", f"{self.share:.0%}"]
        if self.plan is None:
            return [*begin, self.failure, *[NOTHING] * (len(HEAD) - 4)]
        ratio = f"{self.planned / self.held:.3f}" if self.held else NOTHING
        memory = [f"{self.planned / MIB:.0f}", f"{self.held / MIB:.0f}", ratio, f"{self.at_most / MIB:.0f}"]
        found = self.plan.prediction
        planned = found.decode_tokens_per_second, found.prefill_tokens_per_second
        speeds = (self.rate, planned[0], self.prompt_rate, planned[1])
        kept = "yes" if self.is_kept else "NO"
        return [*begin, placed(self.plan), *memory, kept, *(f"{speed:.4g}" for speed in speeds)]


def budget_rows(
    path: Path, shares: Sequence[float], *, context: int, generated: int, threads: int | None
) -> Iterator[BudgetRow]:
    """The file at budgets that are shares of what all of it takes of the GPU."""
    whole = plan_model(path, context=context, threads=threads, draft=None).plan.bytes_on("gpu")
    for place, share in enumerate((shares[len(shares) // 2], *shares)):
        row = _row(path, int(share * whole), share, context, generated, threads)
        if place:  # the first one brings the libraries
            yield row


def _row(
    path: Path, budget: int, share: float, context: int, generated: int, threads: int | None
) -> BudgetRow:
    mark = MemoryMark()
    try:
        with load(path, context=context, vram=budget, threads=threads, draft=None) as model:
            generate = Workload("generate", generated)
            prompt = Workload("prompt", min(512, context - 16))
            rates = []
            for workload in (generate, prompt):
                own_seconds(model, workload)
                rates.append(workload.tokens / min(own_seconds(model, workload) for _ in range(2)))
            at_most = mark.at_most()
            return BudgetRow(model.name, budget, share, model.plan, mark.held(), at_most, rates[0], rates[1])
    except EdgeInferError as error:
        return BudgetRow(path.stem, budget, share, None, 0, 0, 0.0, 0.0, str(error))
