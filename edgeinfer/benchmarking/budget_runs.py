"""A model through budgets of GPU memory: what it takes, and how fast it is, against what was planned."""

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
    "model", "budget", "share", "placed", "planned MiB", "taken MiB", "planned/taken", "within the budget",
    "tokens/s", "planned", "prompt tokens/s", "planned",
)  # fmt: skip
MIB = 1 << 20


@dataclass(frozen=True)
class BudgetRow:
    """One budget of one model; `taken` bytes of GPU memory at most, rates in tokens per second.

    `failure`: why there is no model; all that was measured is 0 then.
    """

    model: str
    budget: int
    share: float
    plan: MemoryPlan | None
    taken: int
    rate: float
    prompt_rate: float
    failure: str = ""

    @property
    def planned(self) -> int:
        """Bytes on the GPU."""
        return self.plan.bytes_on("gpu") if self.plan else 0

    @property
    def is_kept(self) -> bool:
        """Whether it was loaded and took no more than it may."""
        return not self.failure and self.taken <= self.budget

    def cells(self) -> list[str]:
        """One row under HEAD."""
        begin = [self.model, f"{self.budget / MIB:.0f} MiB", f"{self.share:.0%}"]
        if self.plan is None:
            return [*begin, self.failure, *[NOTHING] * (len(HEAD) - 4)]
        ratio = f"{self.planned / self.taken:.3f}" if self.taken else NOTHING
        memory = [
            f"{self.planned / MIB:.0f}",
            f"{self.taken / MIB:.0f}",
            ratio,
            "yes" if self.is_kept else "NO",
        ]
        found = self.plan.prediction
        planned = found.decode_tokens_per_second, found.prefill_tokens_per_second
        speeds = (self.rate, planned[0], self.prompt_rate, planned[1])
        return [*begin, placed(self.plan), *memory, *(f"{speed:.4g}" for speed in speeds)]


def budget_rows(
    path: Path,
    shares: Sequence[float],
    mark: MemoryMark,
    *,
    context: int,
    generated: int,
    threads: int | None,
) -> Iterator[BudgetRow]:
    """The file at budgets that are shares of what all of it takes of the GPU. Libraries, which a process
    loads once, count from the `mark` on, for every budget.
    """
    whole = plan_model(path, context=context, threads=threads, draft=None).plan.bytes_on("gpu")
    for share in shares:
        yield _row(path, int(share * whole), share, mark, context, generated, threads)


def _row(
    path: Path,
    budget: int,
    share: float,
    mark: MemoryMark,
    context: int,
    generated: int,
    threads: int | None,
) -> BudgetRow:
    mark.begin()
    try:
        with load(path, context=context, vram=budget, threads=threads, draft=None) as model:
            generate = Workload("generate", generated)
            prompt = Workload("prompt", min(512, context - 16))
            rates = []
            for workload in (generate, prompt):
                own_seconds(model, workload)
                rates.append(workload.tokens / min(own_seconds(model, workload) for _ in range(2)))
            return BudgetRow(model.name, budget, share, model.plan, mark.taken(), rates[0], rates[1])
    except EdgeInferError as error:
        return BudgetRow(path.stem, budget, share, None, 0, 0.0, 0.0, str(error))
