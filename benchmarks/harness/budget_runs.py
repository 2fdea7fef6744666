"""A model through budgets of GPU memory: what it takes, and how fast it is, against what was planned.

What libraries and the driver take isn't seen here: a process loads them once, with the first model. The plan
has an item for them, which is left out of both sides.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from edgeinfer.benchmarking.tables import NOTHING
from edgeinfer.benchmarking.workloads import Workload, random_ids
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cuda.device_work import MemoryMark, release_pinned
from edgeinfer_offload.machine.measure import measured_bandwidth, read_bandwidth, select_threads
from edgeinfer_offload.machine.peak_memory import own_resident_bytes
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness.cuda_runs import own_seconds
from harness.split_runs import overhead, placed

HEAD = (
    "model", "budget", "share", "placed", "GPU MiB", "planned/held", "at most MiB", "CPU MiB", "planned/held",
    "kept", "tokens/s", "measured/planned", "prompt tokens/s", "measured/planned", "memory now",
)  # fmt: skip
MIB = 1 << 20
MAX_OVER, SLACK = 1.01, 8 * MIB
"""What is held may be so much of what was planned, and kernels that a process compiles late."""
PROMPT = 512
WARM_UP = 4
"""Tokens that aren't counted."""
PROMPTS, PROMPT_SECONDS = 8, 2.0
"""Prompts that are read at most, and for how long; the first isn't counted."""


class HostMemoryMark:
    """Main memory that is taken from here on, in pages of this process's own; pinned ones are among them."""

    def __init__(self) -> None:
        release_pinned()
        self._taken = own_resident_bytes()

    def held(self) -> int:
        """Bytes that are taken now."""
        return own_resident_bytes() - self._taken


@dataclass(frozen=True)
class Measured:
    """Bytes of both sides that were `held` when everything had run, and on the GPU `at_most`; rates in tokens
    per second, of the median token and the median prompt. `memory`: how fast main memory is read right after
    them, of what the plan counts on; others may use it too.
    """

    gpu_held: int
    gpu_at_most: int
    cpu_held: int
    rate: float
    prompt_rate: float
    memory: float


@dataclass(frozen=True)
class BudgetRow:
    """One budget of one model. `failure`: why there is no model."""

    model: str
    budget: int
    share: float
    plan: MemoryPlan | None = None
    measured: Measured | None = None
    failure: str = ""

    @property
    def planned(self) -> int:
        """Bytes on the GPU but those of libraries and of the driver."""
        return self.plan.own_gpu_bytes if self.plan else 0

    @property
    def is_kept(self) -> bool:
        """Whether it was loaded, holds what was planned, and never took more than it may."""
        measured = self.measured
        if self.failure or measured is None:
            return False
        return measured.gpu_held <= MAX_OVER * self.planned + SLACK and measured.gpu_at_most <= self.budget

    @property
    def promises(self) -> tuple[float, float]:
        """Tokens per second of the plan, after few tokens; and those of a prompt."""
        assert self.plan is not None
        prediction = self.plan.prediction
        return 1 / prediction.seconds_empty, prediction.prefill_tokens_per_second

    def cells(self) -> list[str]:
        """One row under HEAD."""
        begin = [self.model, f"{self.budget / MIB:.0f} MiB", f"{self.share:.0%}"]
        if self.plan is None or self.measured is None:
            return [*begin, self.failure, *[NOTHING] * (len(HEAD) - 4)]
        measured, here = self.measured, self.plan.bytes_on("cpu")
        memory = [
            *_against(self.planned, measured.gpu_held),
            f"{measured.gpu_at_most / MIB:.0f}",
            *_against(here, measured.cpu_held),
        ]
        speeds = zip((measured.rate, measured.prompt_rate), self.promises, strict=True)
        kept = "yes" if self.is_kept else "NO"
        shown = [cell for rate, promise in speeds for cell in (f"{rate:.4g}", f"{rate / promise:.2f}")]
        return [*begin, placed(self.plan), *memory, kept, *shown, f"{measured.memory:.2f}"]


def _against(planned: int, held: int) -> tuple[str, str]:
    return f"{planned / MIB:.0f}", f"{planned / held:.3f}" if held > 0 else NOTHING


def budget_rows(
    path: Path, shares: Sequence[float], *, context: int, generated: int, threads: int | None
) -> Iterator[BudgetRow]:
    """The file at budgets that are shares of its weights, keys and values, on top of what libraries and
    buffers take.
    """
    sizes = model_sizes(path)
    reserved = overhead(path, context, "auto", threads, sizes)
    for place, share in enumerate((shares[len(shares) // 2], *shares)):
        row = _row(path, reserved + int(share * sizes.nbytes), share, context, generated, threads)
        if place:  # the first one brings the libraries
            yield row


def _row(
    path: Path, budget: int, share: float, context: int, generated: int, threads: int | None
) -> BudgetRow:
    gc.collect()  # of the model before
    mark, here = MemoryMark(), HostMemoryMark()
    try:
        with load(path, context=context, vram=budget, threads=threads, draft=None) as model:
            rate = 1 / token_seconds(model, generated)
            prompt = Workload("prompt", min(PROMPT, context - 16))
            own_seconds(model, prompt)
            seconds = [own_seconds(model, prompt)]
            while len(seconds) < PROMPTS - 1 and sum(seconds) < PROMPT_SECONDS:
                seconds.append(own_seconds(model, prompt))
            _take_buffers(model, model.plan)
            held = mark.held(), mark.at_most(), here.held()
            name, plan = model.name, model.plan
        measured = Measured(*held, rate, prompt.tokens / median(seconds), _memory_now(threads))
        return BudgetRow(name, budget, share, plan, measured)
    except EdgeInferError as error:
        return BudgetRow(path.stem, budget, share, failure=str(error))


def _memory_now(threads: int | None) -> float:
    folder = user_folder("cache")
    count = threads or select_threads(folder).count
    return read_bandwidth(folder, count) / measured_bandwidth(folder, count)


def _take_buffers(model: Model, plan: MemoryPlan | None) -> None:
    """Read the longest prompt that the CPU computes itself: its buffers, which are planned for, take memory
    when they are written to.
    """
    stream_min_tokens = plan.prediction.stream_min_tokens if plan else None
    if stream_min_tokens is not None and 1 < stream_min_tokens <= PROMPT:
        own_seconds(model, Workload("prompt", stream_min_tokens - 1))


def token_seconds(model: Model, count: int) -> float:
    """The median token of `count`, decoded one by one.

    What is read is random, not what was answered: a random model soon answers the same again and again, and
    its experts are the same ones then. All on the GPU that makes no difference, and the answer is taken.
    """
    engine = model.engine
    ids = random_ids(WARM_UP + count, engine.vocabulary_size, 1)
    backend = engine.backend if isinstance(engine, NativeEngine) else None
    if backend is not None and backend.name == "cuda":
        own_seconds(model, Workload("generate", WARM_UP))
        return own_seconds(model, Workload("generate", count)) / count
    engine.rewind(0)
    spent = []
    for place, token in enumerate(ids):
        begin = time.perf_counter()
        if isinstance(backend, SplitBackend):
            backend.sample_next(token, place)
        else:
            engine.append([token])
        spent.append(time.perf_counter() - begin)
    return median(spent[WARM_UP:])
