"""Budgets of GPU memory from 5 % to 120 % of a model: bytes and speeds against the plan.

python benchmarks/budget_sweep.py --models llama-3-8b:32:Q4_0,qwen3-30b-a3b:10:Q4_0,tiny

A model is a shape, the number of its layers, and a type; or a name of the registry, or a file. Budgets are
shares of the weights; libraries and buffers are added. The exit code is 1 if a budget is exceeded.
"""

import argparse
import sys
from pathlib import Path

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading import gpu_loading
from edgeinfer_kernels.cuda.driver import list_gpus
from harness import suites
from harness.budget_runs import HEAD, BudgetRow, budget_rows

MODELS = "llama-3-8b:32:Q4_0,qwen3-30b-a3b:10:Q4_0,tiny"
SHARES = "0.05,0.15,0.25,0.35,0.45,0.55,0.65,0.75,0.85,0.95,1.05,1.2"


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS, help="(%(default)s)")
    parser.add_argument("--shares", default=SHARES, help="of the weights (%(default)s)")
    parser.add_argument("--context", type=int, default=528, help="(%(default)s)")
    parser.add_argument("--generated", type=int, default=24, help="tokens that are timed (%(default)s)")
    parser.add_argument("--tuning", type=float, default=1.0, help="seconds of tuning a step (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: those that read fastest)")
    parser.add_argument("--folder", type=Path, help="folder that keeps the model files (default: none)")
    parser.add_argument(
        "--smoke", action="store_true", help="two layers of a small model, to check that the program runs"
    )
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU: no memory to limit", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.shares, options.generated = "llama-3.2-1b:2:Q4_0", "0.5,1.2", 4
    gpu_loading.TUNING_SECONDS = options.tuning
    shares = suites.shares(options.shares)
    rows: list[BudgetRow] = []
    print(" | ".join(HEAD), file=sys.stderr, flush=True)
    for path in suites.model_files(suites.words(options.models), options.folder):
        for row in budget_rows(
            path,
            shares,
            context=options.context,
            generated=options.generated,
            threads=options.threads,
        ):
            rows.append(row)
            print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    print(markdown(HEAD, [row.cells() for row in rows], left=(0, 3)))
    if not all(row.is_within_budget for row in rows):
        sys.exit("a budget was exceeded")


if __name__ == "__main__":
    suites.main(main)
