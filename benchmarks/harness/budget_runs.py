"""Memory and speed of a model at budgets of GPU memory, compared with the plan.

The memory of libraries and driver isn't measured here: a process loads them once, with the first model. The
plan has an item for them, which is excluded on both sides.
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
from edgeinfer_kernels.cuda.device_parts import cuda_device
from edgeinfer_kernels.cuda.device_work import MemoryMark, release_pinned
from edgeinfer_offload.machine.measure import measured_bandwidth, read_bandwidth, select_threads
from edgeinfer_offload.machine.peak_memory import own_resident_bytes
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness.cuda_runs import workload_seconds
from harness.split_runs import overhead, placed

HEAD = (
    "model", "budget", "share", "placed", "GPU MiB", "planned/held", "at most MiB", "CPU MiB", "planned/held",
    "kept", "tokens/s", "measured/planned", "prompt tokens/s", "measured/planned", "memory now",
)  # fmt: skip
MIB = 1 << 20
MAX_OVER, SLACK = 1.01, 8 * MIB
"""Maximum ratio of held to planned bytes, and an allowance for kernels that are compiled late."""
PROMPT = 512
WARM_UP = 4
"""Tokens that aren't timed."""
PROMPTS, PROMPT_SECONDS = 8, 2.0
"""Maximum number of timed prompts, and time limit; the first prompt isn't counted."""


class HostMemoryMark:
    """Main memory that this process allocates from now on, including pinned memory."""

    def __init__(self) -> None:
        release_pinned()
        self._taken = own_resident_bytes()

    def held(self) -> int:
        """Bytes allocated now."""
        return own_resident_bytes() - self._taken


@dataclass(frozen=True)
class Measured:
    """Bytes `held` on both devices after the run, and the peak on the GPU; rates in tokens
    per second, of the median token and the median prompt. `memory`: main memory bandwidth directly after
    the run, relative to the plan's; other programs may use it too.
    """

    gpu_held: int
    gpu_at_most: int
    cpu_held: int
    rate: float
    prompt_rate: float
    memory: float


@dataclass(frozen=True)
class BudgetRow:
    """One budget of one model. `failure`: the reason why the model couldn't be loaded."""

    model: str
    budget: int
    share: float
    plan: MemoryPlan | None = None
    measured: Measured | None = None
    failure: str = ""

    @property
    def planned(self) -> int:
        """Bytes on the GPU except those of libraries and driver."""
        return self.plan.own_gpu_bytes if self.plan else 0

    @property
    def is_within_budget(self) -> bool:
        """Whether it was loaded, holds the planned bytes, and never exceeded the budget."""
        measured = self.measured
        if self.failure or measured is None:
            return False
        return measured.gpu_held <= MAX_OVER * self.planned + SLACK and measured.gpu_at_most <= self.budget

    @property
    def predictions(self) -> tuple[float, float]:
        """Predicted tokens per second after few tokens, and of a prompt."""
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
            *_planned_over_held(self.planned, measured.gpu_held),
            f"{measured.gpu_at_most / MIB:.0f}",
            *_planned_over_held(here, measured.cpu_held),
        ]
        speeds = zip((measured.rate, measured.prompt_rate), self.predictions, strict=True)
        within_budget = "yes" if self.is_within_budget else "NO"
        shown = [cell for rate, predicted in speeds for cell in (f"{rate:.4g}", f"{rate / predicted:.2f}")]
        return [*begin, placed(self.plan), *memory, within_budget, *shown, f"{measured.memory:.2f}"]


def _planned_over_held(planned: int, held: int) -> tuple[str, str]:
    return f"{planned / MIB:.0f}", f"{planned / held:.3f}" if held > 0 else NOTHING


def budget_rows(
    path: Path, shares: Sequence[float], *, context: int, generated: int, threads: int | None
) -> Iterator[BudgetRow]:
    """Rows of the file at budgets that are shares of its weights, keys and values; libraries and
    buffers are added.
    """
    sizes = model_sizes(path)
    reserved = overhead(path, context, "auto", threads, sizes)
    for index, share in enumerate((shares[len(shares) // 2], *shares)):
        row = _row(path, reserved + int(share * sizes.nbytes), share, context, generated, threads)
        if index:  # the first model loads the libraries
            yield row


def _row(
    path: Path, budget: int, share: float, context: int, generated: int, threads: int | None
) -> BudgetRow:
    gc.collect()  # memory of the previous model
    mark, here = MemoryMark(cuda_device(0)), HostMemoryMark()
    try:
        with load(path, context=context, vram=budget, threads=threads, draft=None) as model:
            rate = 1 / token_seconds(model, generated)
            prompt = Workload("prompt", min(PROMPT, context - 16))
            workload_seconds(model, prompt)
            seconds = [workload_seconds(model, prompt)]
            while len(seconds) < PROMPTS - 1 and sum(seconds) < PROMPT_SECONDS:
                seconds.append(workload_seconds(model, prompt))
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
    """Process the longest prompt that the CPU computes itself, because its planned buffers are only backed by
    memory once they are written.
    """
    stream_min_tokens = plan.prediction.stream_min_tokens if plan else None
    if stream_min_tokens is not None and 1 < stream_min_tokens <= PROMPT:
        workload_seconds(model, Workload("prompt", stream_min_tokens - 1))


def token_seconds(model: Model, count: int) -> float:
    """The median token of `count`, decoded one by one.

    The input is random tokens, not the sampled ones: a random model soon repeats itself, and then uses the
    same experts. If everything is on the GPU this makes no difference, and the sampled tokens are used.
    """
    engine = model.engine
    ids = random_ids(WARM_UP + count, engine.vocabulary_size, 1)
    backend = engine.backend if isinstance(engine, NativeEngine) else None
    if backend is not None and backend.name == "cuda":
        workload_seconds(model, Workload("generate", WARM_UP))
        return workload_seconds(model, Workload("generate", count)) / count
    return median(token_times(model, ids)[WARM_UP:])


def token_times(model: Model, ids: Sequence[int]) -> list[float]:
    """Seconds of each of these tokens, decoded one by one in an empty text."""
    engine = model.engine
    backend = engine.backend if isinstance(engine, NativeEngine) else None
    engine.rewind(0)
    spent = []
    for index, token in enumerate(ids):
        begin = time.perf_counter()
        if isinstance(backend, SplitBackend):
            backend.sample_next(token, index)
        else:
            engine.append([token])
        spent.append(time.perf_counter() - begin)
    return spent
