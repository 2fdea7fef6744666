"""The same file's MTP head in edgeinfer and in llama.cpp: tokens per second with and without it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading.loading import load
from harness.drafts.comparison import (
    DraftSuite,
    Variants,
    alternate,
    answer_of,
    best_decile,
    cells,
    report,
    shown,
)
from harness.llama_bench import LlamaBench
from harness.llama_speculative import LlamaSpeculative

PROMPTS = ("Once upon a time", "The cat sat on a mat", "import numpy as np", "Dear Sir")
"""The texts after them differ: each token follows from the one before it."""
LENGTHS = (1, 2, 3, 4, 5)
"""Maximum draft tokens of llama.cpp, which are all tried; ours are selected by the controller."""
CONTEXT = 1024


@dataclass(frozen=True)
class Comparison:
    """The settings of both sides."""

    suite: DraftSuite
    program: Path | None
    """llama.cpp's `llama-speculative-simple`, next to `llama-bench`."""

    def rows(self, path: Path) -> Iterator[list[str]]:
        """The rows of a file."""
        yield from self._ours(path)
        if self.program is not None:
            yield from self._theirs(path, self.program)

    def _ours(self, path: Path) -> Iterator[list[str]]:
        options: dict[str, Any] = {**self.suite.loading, "context": CONTEXT}
        with load(path, draft=None, **options) as plain, load(path, draft="mtp", **options) as drafting:
            models = {"baseline": plain, "its head": drafting}
            variants: Variants = {
                f"{name}{prompt}": answer_of(model, prompt, self.suite.greedy)
                for prompt in PROMPTS
                for name, model in models.items()
            }
            report(f"a head that agrees, {path.stem}")
            completions = alternate(variants, self.suite.rounds)
        of_all = {
            name: [each for prompt in PROMPTS for each in completions[f"{name}{prompt}"]] for name in models
        }
        for name, answers in of_all.items():
            yield shown([path.stem, "edgeinfer", name, *cells(answers, of_all["baseline"])])

    def _theirs(self, path: Path, program: Path) -> Iterator[list[str]]:
        tokens, threads = self.suite.tokens, self.suite.threads
        arguments = ["-ngl", "0" if self.suite.device == "cpu" else "99"]
        arguments += ["-t", str(threads)] if threads else []
        bench = LlamaBench(program.with_name("llama-bench"), arguments)
        (timings,) = bench.run(path, [Workload("generate", tokens, 0)], self.suite.rounds)
        base = timings.rates
        yield shown(_row(path, "baseline", base, base, "-"))
        drafting = LlamaSpeculative(program, arguments)
        for length in LENGTHS:
            try:
                runs = [drafting.run(path, prompt, tokens, length) for prompt in PROMPTS]
            except EdgeInferError as error:
                report(str(error))
                continue
            accepted = f"{median(run.accepted for run in runs):.0%}"
            yield shown(_row(path, f"its head, {length}", [run.rate for run in runs], base, accepted))


def _row(path: Path, name: str, rates: list[float], base: list[float], accepted: str) -> list[str]:
    best, middle = best_decile(rates), median(rates)
    return [
        path.stem,
        "llama.cpp",
        name,
        f"{best:.1f}",
        f"{best / best_decile(base):.2f}x",
        f"{middle:.1f}",
        f"{middle / median(base):.2f}x",
        accepted,
        "-",
    ]
