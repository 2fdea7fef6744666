"""Reading prompts on the CPU against llama.cpp, interleaved.

python benchmarks/cpu_prefill.py --shapes tinyllama-1.1b --types Q4_0,Q4_K_M --threads 1,2 --prompts 512,32
"""

from edgeinfer.benchmarking.workloads import Workload
from harness import suites


def main() -> None:
    """Run what the command line asks for."""
    parser = suites.parser(__doc__ or "")
    parser.add_argument("--prompts", default="512,32", help="lengths with commas (%(default)s)")
    parser.add_argument("--depths", default="0", help="tokens in the cache, with commas (%(default)s)")
    options = parser.parse_args()
    suite = suites.suite("Reading prompts on the CPU", options)
    prompts = (16,) if suite.smoke else suites.whole_numbers("--prompts", options.prompts, 1)
    depths = suites.whole_numbers("--depths", options.depths, 0)
    workloads = [Workload("prompt", tokens, depth) for depth in depths for tokens in prompts]
    suite.publish([("pp, tokens/s", suite.speeds(workloads))])


if __name__ == "__main__":
    suites.main(main)
