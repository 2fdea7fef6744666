"""A model divided between GPU and CPU: does it answer as the CPU alone does, and what does a token take?

python benchmarks/divided_steps.py --models llama-3-8b:8:Q4_0,qwen3-30b-a3b:12:Q4_0 --shares 0.2,0.5,0.8

A model is a shape, how many of its layers, and a type. Ends with exit code 1 if an answer differs.
"""

import argparse
import sys

from edgeinfer.benchmarking.random_files import written_shapes
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading import gpu_loading
from edgeinfer_kernels.cuda.driver import list_gpus
from harness import suites
from harness.split_step_runs import HEAD, divided_rows


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3-8b:8:Q4_0,qwen3-30b-a3b:12:Q4_0", help="(%(default)s)")
    parser.add_argument("--shares", default="0.2,0.6", help="of what all of it takes (%(default)s)")
    parser.add_argument("--context", type=int, default=528, help="(%(default)s)")
    parser.add_argument("--generated", type=int, default=64, help="tokens of a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="of the CPU (as many as read fastest)")
    parser.add_argument("--tuning", type=float, default=3.0, help="seconds at most (%(default)s)")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="two layers of a small model: does it run?")
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU here: nothing to divide", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.shares, options.generated, options.rounds = "llama-3.2-1b:2:Q4_0", "0.5", 8, 1
    gpu_loading.TUNING_SECONDS = options.tuning
    shares = suites.shares(options.shares)
    rows = []
    for path in written_shapes(suites.words(options.models), None):
        for row in divided_rows(
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
        sys.exit("a divided model doesn't answer as the CPU does")


if __name__ == "__main__":
    suites.main(main)
