"""A model split between GPU and CPU: its logits against the CPU's alone, and the time of a token.

python benchmarks/split_steps.py --models llama-3-8b:8:Q4_0,qwen3-30b-a3b:12:Q4_0 --shares 0.2,0.5,0.8

A model is a shape, the number of its layers, and a type. Ends with exit code 1 if logits differ.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.workloads import Workload, random_ids
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading import gpu_loading
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer_kernels.cuda.driver import list_gpus
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness import suites
from harness.cuda_runs import workload_seconds
from harness.split_runs import placed

HEAD = (
    "model", "GPU memory", "placed", "planned ms/token", "measured ms/token", "prompt t/s",
    "logits of a step", "of a prompt", "experts on the CPU",
)  # fmt: skip
STEP, PROMPT = 6, 96
"""Tokens of a step and of a prompt."""
CLOSE = 0.1
"""Maximum relative distance of the logits, of the median row. Both devices round activations in different
groups, and almost equal scores select other experts.
"""


@dataclass(frozen=True)
class SplitStepRow:
    """One budget of one model; distances are of the median row, over its length."""

    model: str
    vram: int
    plan: MemoryPlan
    ms_per_token: float
    prompt_rate: float
    step_distance: float
    prompt_distance: float
    experts_here: float | None
    """The share of the selected experts that the CPU computed; None: not a split MoE."""

    @property
    def is_close(self) -> bool:
        """Whether the logits are those of the CPU."""
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


def distance(logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The median row's distance, relative to the expected row's length."""
    rows = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(np.median(rows))


def split_step_rows(
    path: Path,
    shares: Sequence[float],
    *,
    context: int,
    generated: int,
    rounds: int,
    threads: int | None,
    device: str,
) -> Iterator[SplitStepRow]:
    """The rows of a file, at budgets that are shares of its bytes on a GPU.

    Raises `EdgeInferError`: a budget leaves nothing to the GPU, or all of the model.
    """
    with load(path, context=context, device="cpu", threads=threads, draft=None) as here:
        ids = random_ids(PROMPT, here.engine.vocabulary_size, 3)
        expected = _logits(here, ids)
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
                raise EdgeInferError(f"{name} with {vram / 2**30:.2f} GiB: not split; {model.warnings}")
            logits = _logits(model, ids)
            generate = Workload("generate", generated)
            workload_seconds(model, generate)
            seconds = min(workload_seconds(model, generate) for _ in range(rounds))
            prompt = Workload("prompt", context - 16)
            workload_seconds(model, prompt)
            prompt_seconds = min(workload_seconds(model, prompt) for _ in range(rounds))
            counts = backend.expert_counts
            yield SplitStepRow(
                name,
                vram,
                plan,
                1000 * seconds / generated,
                prompt.tokens / prompt_seconds,
                distance(logits[0], expected[0]),
                distance(logits[1], expected[1]),
                counts.on_cpu / counts.total if counts.total else None,
            )


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3-8b:8:Q4_0,qwen3-30b-a3b:12:Q4_0", help="(%(default)s)")
    parser.add_argument("--shares", default="0.2,0.6", help="shares of the whole model's bytes (%(default)s)")
    parser.add_argument("--context", type=int, default=528, help="(%(default)s)")
    parser.add_argument("--generated", type=int, default=64, help="tokens of a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: those that read fastest)")
    parser.add_argument("--tuning", type=float, default=3.0, help="seconds at most (%(default)s)")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument(
        "--smoke", action="store_true", help="two layers of a small model, to check that the program runs"
    )
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU: nothing to split", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.shares, options.generated, options.rounds = "llama-3.2-1b:2:Q4_0", "0.5", 8, 1
    gpu_loading.TUNING_SECONDS = options.tuning
    shares = suites.shares(options.shares)
    rows = []
    for path in suites.written_shapes(suites.words(options.models), None):
        for row in split_step_rows(
            path,
            shares,
            context=options.context,
            generated=options.generated,
            rounds=options.rounds,
            threads=options.threads,
            device=options.device,
        ):
            rows.append(row)
            print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    print(markdown(HEAD, [row.cells() for row in rows], left=(0, 2)))
    if not all(row.is_close for row in rows):
        sys.exit("the logits of a split model differ from the CPU's")


if __name__ == "__main__":
    suites.main(main)
