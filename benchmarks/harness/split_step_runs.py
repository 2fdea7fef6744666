"""A model divided between GPU and CPU: that it answers as the CPU alone does, and how fast."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.workloads import Workload, random_ids
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness.cuda_runs import own_seconds
from harness.split_runs import placed

HEAD = (
    "model", "GPU memory", "placed", "planned ms/token", "measured ms/token", "prompt t/s",
    "logits of a step", "of a prompt", "experts on the CPU",
)  # fmt: skip
STEP, PROMPT = 6, 96
"""Tokens of the two ways to read."""
CLOSE = 0.1
"""Distance over length between logits of the two, of the median row: both round activations, each in its own
groups, and experts flip at near-ties.
"""


@dataclass(frozen=True)
class DividedRow:
    """One budget of one model; distances are of the median row, over its length."""

    model: str
    vram: int
    plan: MemoryPlan
    ms_per_token: float
    prompt_rate: float
    step_distance: float
    prompt_distance: float
    experts_here: float | None
    """The share of the chosen experts that were the CPU's; None: no mixture is divided."""

    @property
    def is_close(self) -> bool:
        """Whether the divided model answers as the CPU does."""
        return max(self.step_distance, self.prompt_distance) < CLOSE

    def cells(self) -> list[str]:
        """One row under HEAD."""
        share = "" if self.experts_here is None else f"{self.experts_here:.0%}"
        rates = (f"{self.plan.ms_per_token:.3f}", f"{self.ms_per_token:.3f}", f"{self.prompt_rate:.0f}")
        distances = (f"{self.step_distance:.4f}", f"{self.prompt_distance:.4f}")
        return [self.model, f"{self.vram / 2**30:.2f} GiB", placed(self.plan), *rates, *distances, share]


def _logits(model: Model, ids: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Of a step, and of a prompt."""
    return model.logits(ids[:STEP]), model.logits(ids)


def distance(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    """The median row's distance over the wanted row's length."""
    rows = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return float(np.median(rows))


def divided_rows(
    path: Path,
    shares: Sequence[float],
    *,
    context: int,
    generated: int,
    rounds: int,
    threads: int | None,
    device: str,
) -> Iterator[DividedRow]:
    """The file at budgets that are shares of what all of it takes of the GPU.

    Raises `EdgeInferError`: a budget leaves nothing to the GPU, or all of the model.
    """
    with load(path, context=context, device="cpu", threads=threads, draft=None) as here:
        ids = random_ids(PROMPT, here.engine.vocabulary_size, 3)
        wanted = _logits(here, ids)
    with load(path, context=context, device=device, draft=None) as there:
        assert there.plan is not None
        whole = sum(item.bytes for item in there.plan.items if item.device == "gpu")
        fixed = sum(i.bytes for i in there.plan.items if i.device == "gpu" and i.layer is None)
        name = there.name
    for share in shares:
        vram = int(fixed + share * (whole - fixed))
        with load(path, context=context, device=device, vram=vram, threads=threads, draft=None) as model:
            plan = model.plan
            backend = getattr(model.engine, "backend", None)
            if plan is None or not isinstance(backend, SplitBackend):
                raise EdgeInferError(f"{name} with {vram / 2**30:.2f} GiB: not divided; {model.notes}")
            found = _logits(model, ids)
            generate = Workload("generate", generated)
            own_seconds(model, generate)
            seconds = min(own_seconds(model, generate) for _ in range(rounds))
            prompt = Workload("prompt", context - 16)
            own_seconds(model, prompt)
            prompt_seconds = min(own_seconds(model, prompt) for _ in range(rounds))
            pairs = backend.pairs
            yield DividedRow(
                name,
                vram,
                plan,
                1000 * seconds / generated,
                prompt.tokens / prompt_seconds,
                distance(found[0], wanted[0]),
                distance(found[1], wanted[1]),
                pairs.here / pairs.seen if pairs.seen else None,
            )
