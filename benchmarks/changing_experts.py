"""Experts that change places while a divided mixture decodes: what they cost and gain on a GPU.

python benchmarks/changing_experts.py --models qwen3-30b-a3b:10:Q4_0 --shares 0.35,0.65

A model is a shape, how many of its layers, and a type. Its weights are random: different tokens go to all
experts alike, a few tokens in turn to few.
"""

import argparse
import sys
from pathlib import Path

from edgeinfer.benchmarking.random_files import written_shapes
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading import gpu_loading
from edgeinfer_kernels.cuda.driver import list_gpus
from harness import suites
from harness.expert_cache_runs import HEAD, TOKENS, changing_rows


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen3-30b-a3b:10:Q4_0", help="(%(default)s)")
    parser.add_argument("--shares", default="0.35,0.65", help="budgets, of the weights (%(default)s)")
    parser.add_argument("--threads", type=int, help="of the CPU (as many as read fastest)")
    parser.add_argument("--folder", type=Path, help="where the models' files are kept (nowhere)")
    parser.add_argument("--smoke", action="store_true", help="one budget of two layers: does it run?")
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU here: no slots to be filled", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.shares = "qwen3-30b-a3b:2:Q4_0", "0.5"
    gpu_loading.TUNING_SECONDS = 0.0
    rows: list[list[str]] = []
    for path in written_shapes(suites.words(options.models), options.folder):
        for share in suites.shares(options.shares):
            rows += changing_rows(path, share, TOKENS + 8, options.threads)
    print(markdown(HEAD, rows, left=(0, 2, 3)))


if __name__ == "__main__":
    suites.main(main)
