"""What a prompt's chunk spends its time on when weights of the CPU are sent: the device's work, by kind.

python benchmarks/sent_prompts.py --models llama-3-8b:32:Q4_0,qwen3-30b-a3b:10:Q4_0 --shares 0.25,0.75
"""

import argparse
import sys
from pathlib import Path

from edgeinfer.benchmarking.random_files import written_shapes
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading import gpu_loading
from edgeinfer_kernels.cuda.driver import list_gpus
from harness import suites
from harness.prompt_phases import HEAD, phase_rows


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3-8b:32:Q4_0", help="shape:layers:type (%(default)s)")
    parser.add_argument("--shares", default="0.5", help="budgets, of the weights (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt (%(default)s)")
    parser.add_argument("--threads", type=int, help="of the CPU (as many as read fastest)")
    parser.add_argument("--folder", type=Path, help="where the models' files are kept (nowhere)")
    parser.add_argument("--smoke", action="store_true", help="two layers of a small model: does it run?")
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU here: nothing to send to", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.tokens = "llama-3.2-1b:2:Q4_0", 64
    gpu_loading.TUNING_SECONDS = 1.0
    shares = suites.shares(options.shares)
    rows: list[list[str]] = []
    for path in written_shapes(suites.words(options.models), options.folder):
        for share in shares:
            rows += phase_rows(path, share, options.tokens, options.threads)
    print(markdown(HEAD, rows, left=(0, 2)))


if __name__ == "__main__":
    suites.main(main)
