"""One GPU, layers on two, and a part of every layer on two (tensor parallel), against llama.cpp's -sm.

python benchmarks/several_gpus/tensor.py --models llama-3.3-70b:20:Q4_K_M,llama-3.1-8b:32:Q4_K_M \
    --llama-bench PATH
python benchmarks/several_gpus/tensor.py --models qwen3-30b-a3b:24:Q4_K_M --settings one,cpu,tensor,small

Each setting is loaded alone. With --profile, also the kernels of its decode steps (of the first rank).
"logits": the distance of the last logits after the prompt from those of one GPU, over their length. With
--smoke, or without two GPUs, the built-in model runs on what is here, and the sums are those of two processes
on the CPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.measuring import SEED
from edgeinfer.benchmarking.tables import NOTHING, markdown, shown_rate
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings
from edgeinfer.benchmarking.workloads import Workload, needed_context, random_ids
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.loading.loading import load
from edgeinfer.loading.tensor import loading as tensor_loading
from edgeinfer.model import Model
from edgeinfer.planning.model_plan import plan_model
from edgeinfer_kernels.cuda.driver import list_gpus
from edgeinfer_offload.machine.peer_sums import sum_figures
from harness import step_table, suites
from harness.cuda_runs import workload_seconds
from harness.llama_bench import LlamaBench
from harness.step_table import step_rows

HEAD = ("model", "test", "setting", "best decile t/s", "median t/s", "of one GPU", "planned t/s", "logits")
SETTINGS = {
    "one": "1 GPU",
    "cpu": "1 GPU of 50 % of the bytes, and the CPU",
    "layers": "2 GPUs, layers",
    "tensor": "2 GPUs, tensor",
    "torch": "2 GPUs, tensor, torch's sums",
    "small": "2 GPUs of 50 % of the bytes, tensor",
    "unequal": "2 GPUs, budgets 3:1, tensor",
}
OWN_BYTES = 1536 << 20
"""What each of two GPUs needs besides its part."""
LAYERS_SHARE = 0.62
"""Budget of each GPU, of the bytes on one, with which neither holds the model alone."""
LLAMA_CPP = {"llama.cpp, 1 GPU": "none", "llama.cpp, layer": "layer", "llama.cpp, tensor": "tensor"}


@dataclass(frozen=True)
class Measured:
    """A setting's timings of each workload, its plan's decode rate, and its logits after the prompt."""

    name: str
    timings: list[Timings]
    planned: float = 0.0
    logits: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class TensorSuite:
    """The settings on one model after another."""

    program: Path | None
    repetitions: int
    workloads: Sequence[Workload]
    gpus: Sequence[int]
    """Indices of two, or none: the built-in model on what is here."""
    settings: Sequence[str]
    profiles: bool = False
    """Whether the kernels of steps are measured too."""
    kernels: list[tuple[str, str]] = field(default_factory=list)
    """Tables of these kernels, with their titles."""

    def rows(self, path: Path) -> Iterator[list[str]]:
        """The rows of a model under HEAD."""
        found: list[Measured] = []
        for name, options in self._settings(path):
            tensor_loading.SUMS = "torch" if name == SETTINGS["torch"] else "auto"
            try:
                found.append(self._ours(path, name, options))
            except EdgeInferError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            yield from self._cells(path.stem, found[0], found[-1])
        for name, mode in LLAMA_CPP.items() if self.program else ():
            theirs = self._theirs(path, name, mode)
            if theirs is not None:
                yield from self._cells(path.stem, found[0], theirs)

    def _settings(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        if len(self.gpus) < 2:
            yield "what is here", {"device": "auto"}
            return
        one, both = f"cuda:{self.gpus[0]}", ",".join(f"cuda:{index}" for index in self.gpus)
        context = needed_context(self.workloads) + 1
        held = plan_model(path, context=context, device=one, draft=None).plan.bytes_on("gpu")
        part, small, quarter = int(LAYERS_SHARE * held), held // 2, held // 4 + OWN_BYTES
        tensor: dict[str, Any] = {"device": both, "split": "tensor"}
        options: dict[str, dict[str, Any]] = {
            "one": {"device": one},
            "cpu": {"device": one, "vram": small},
            "layers": {"device": both, "split": "layers", "vram": (part, part)},
            "tensor": tensor,
            "torch": tensor,
            "small": {**tensor, "vram": (small + OWN_BYTES, small + OWN_BYTES)},
            "unequal": {**tensor, "vram": (3 * quarter, quarter)},
        }
        yield from ((SETTINGS[name], options[name]) for name in self.settings)

    def _ours(self, path: Path, name: str, options: dict[str, Any]) -> Measured:
        context = needed_context(self.workloads) + 1
        with load(path, context=context, draft=None, **options) as model:
            for detail in model.details:
                print(f"{name}: {detail}", file=sys.stderr, flush=True)
            engine, timings = model.engine, []
            for workload in self.workloads:
                workload_seconds(model, workload)
                seconds = [workload_seconds(model, workload) for _ in range(self.repetitions)]
                timings.append(Timings(tuple(seconds), workload.tokens))
            if self.profiles:
                self._profile(model, f"{path.stem}, {name}")
            engine.rewind(0)
            longest = max(workload.tokens for workload in self.workloads if workload.kind == "prompt")
            logits = np.asarray(engine.append(random_ids(longest, engine.vocabulary_size, SEED)))
            plan = model.plan
            rate = plan.prediction.decode_tokens_per_second if plan is not None else 0.0
        return Measured(name, timings, rate, logits.reshape(-1))

    def _profile(self, model: Model, title: str) -> None:
        device = torch.device(f"cuda:{self.gpus[0]}" if self.gpus else "cpu")
        generation = next(each for each in self.workloads if each.kind == "generate")
        rows = step_rows(model, device, lambda: workload_seconds(model, generation))
        table = markdown(step_table.HEAD, rows) if rows else "no steps on a GPU"
        self.kernels.append((f"Kernels of a step: {title}", table))
        print(f"{title}\n{table}", file=sys.stderr, flush=True)

    def _theirs(self, path: Path, name: str, mode: str) -> Measured | None:
        """None: this build has no such mode."""
        assert self.program is not None
        bench = LlamaBench(self.program, ("-ngl", "99", "-sm", mode))
        try:
            return Measured(name, bench.run(path, self.workloads, self.repetitions))
        except EdgeInferError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return None

    def _cells(self, model: str, first: Measured, own: Measured) -> Iterator[list[str]]:
        distance = NOTHING
        if own.logits is not None and first.logits is not None:
            apart = np.linalg.norm(own.logits - first.logits) / np.linalg.norm(first.logits)
            distance = f"{apart:.1e}"
        for at, (workload, timings) in enumerate(zip(self.workloads, own.timings, strict=True)):
            ratio = timings.rate_at(MEDIAN) / first.timings[at].rate_at(MEDIAN)
            planned = shown_rate(own.planned) if workload.kind == "generate" and own.planned else NOTHING
            rates = [shown_rate(timings.rate_at(share)) for share in (BEST_DECILE, MEDIAN)]
            row = [model, workload.name, own.name, *rates, f"{ratio:.2f}x", planned, distance]
            print(" | ".join(row), file=sys.stderr, flush=True)
            yield row


def sums_table(devices: Sequence[str]) -> str:
    """What a sum over these devices takes."""
    figures = sum_figures(devices)
    how = "symmetric memory" if figures["symmetric"] else "torch.distributed"
    micros, rate = 1e6 * figures["sum_seconds"], figures["bytes_per_second"] / 1e9
    head = ("devices", "sums of a step", "16 KB, µs", "16 MB, GB/s")
    return markdown(head, [[" + ".join(devices), how, f"{micros:.1f}", f"{rate:.1f}"]], left=(0, 1))


def main() -> None:
    """Run the settings on the models of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, built for these GPUs")
    parser.add_argument(
        "--models", default="llama-3.3-70b:20:Q4_K_M,llama-3.1-8b:32:Q4_K_M",
        help="shape:layers:type, names or paths, with commas (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="keep the random files there")
    parser.add_argument("--gpus", default="0,1", help="indices (%(default)s)")
    parser.add_argument(
        "--settings", default="one,layers,tensor,torch", help=f"of {', '.join(SETTINGS)} (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel of a step")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to check that it runs")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    indices = suites.whole_numbers("--gpus", options.gpus, 0)
    here = tuple(index for index in indices if index < len(list_gpus()))
    gpus = here if len(here) > 1 else ()
    generated, prompt = (8, 32) if options.smoke else (128, 512)
    workloads = [Workload("generate", generated, 0), Workload("prompt", prompt, 0)]
    settings = suites.words(options.settings)
    if wrong := sorted(set(settings) - set(SETTINGS)):
        raise SettingError(f"--settings: saw {wrong[0]!r}, wanted some of {', '.join(SETTINGS)}")
    repetitions = 2 if options.smoke else options.repetitions
    suite = TensorSuite(options.llama_bench, repetitions, workloads, gpus, settings, options.profile)
    models = ("tiny",) if options.smoke or not gpus else suites.words(options.models)
    devices = [f"cuda:{index}" for index in gpus] or ["cpu", "cpu"]
    sections = [("Sums over the devices", sums_table(devices))]
    rows = [row for path in suites.model_files(models, options.folder) for row in suite.rows(path)]
    sections.append(("Tensor parallel", markdown(HEAD, rows, left=(0, 1, 2))))
    sections += suite.kernels
    facts = [f"GPU: {gpu.name} (cuda:{gpu.index})" for gpu in list_gpus() if gpu.index in gpus]
    suites.write_report("Two GPUs", [*facts, *this_machine(command_line()).lines()], sections, options.out)


if __name__ == "__main__":
    suites.main(main)
