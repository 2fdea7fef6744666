"""Models larger than the GPU: edgeinfer within a budget against llama.cpp's best setting for it, alternating.

python benchmarks/cuda_split.py --llama-bench PATH --shapes llama-3-8b --types Q4_0 --shares 0.25,0.5,0.75
"""

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer_offload.planner.plan_types import PROMPT
from harness import cuda_runs, suites
from harness.split_runs import HEAD, SplitSuite


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = cuda_runs.parser(__doc__ or "")
    parser.add_argument(
        "--shares", default="0.25,0.5,0.75", help="budgets, as shares of the weights (%(default)s)"
    )
    parser.add_argument("--threads", type=int, help="threads of both programs (default: each chooses)")
    parser.add_argument("--generated", type=int, default=128, help="tokens of a run (%(default)s)")
    parser.set_defaults(shapes="llama-3-8b", types="Q4_0", rounds=2, repetitions=3)
    options = parser.parse_args()
    shared = cuda_runs.suite(options)
    suite = SplitSuite(
        shared.benched_models(),
        suites.shares("0.5" if options.smoke else options.shares),
        options.llama_bench,
        options.threads,
        shared.rounds,
        shared.repetitions,
        options.device or "auto",
    )
    prompt, generated = (32, 8) if options.smoke else (PROMPT, options.generated)
    rows = list(suite.compare([Workload("generate", generated), Workload("prompt", prompt)]))
    table = markdown(HEAD, [row.cells() for row in rows], left=(0, 2, 3, len(HEAD) - 1))
    facts = [
        f"GPU: {cuda_runs.gpu_name()}",
        "budgets count weights, keys and values; libraries and buffers are added",
        *this_machine(command_line()).lines(),
    ]
    suites.write_report("Models larger than the GPU", facts, [("tokens/s", table)], options.out)


if __name__ == "__main__":
    suites.main(main)
