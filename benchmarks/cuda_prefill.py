"""Reading prompts on a GPU against llama.cpp's CUDA build, in turns.

python benchmarks/cuda_prefill.py --llama-bench PATH --prompts 512 --depths 0,4096
"""

from edgeinfer.benchmarking.workloads import Workload
from harness import cuda_runs, suites


def main() -> None:
    """Run what the command line asks for."""
    parser = cuda_runs.parser(__doc__ or "")
    parser.add_argument("--prompts", default="512,2048", help="lengths with commas (%(default)s)")
    parser.add_argument("--depths", default="0", help="tokens in the cache (%(default)s)")
    options = parser.parse_args()
    suite = cuda_runs.suite(options)
    prompts = (16,) if options.smoke else suites.whole_numbers("--prompts", options.prompts, 1)
    depths = suites.whole_numbers("--depths", options.depths, 0)
    found = list(suite.compare([Workload("prompt", tokens, depth) for depth in depths for tokens in prompts]))
    sections = [("pp, tokens/s", cuda_runs.table(found))]
    cuda_runs.publish("Reading prompts on a GPU", cuda_runs.gpu_name(), suite, sections, options.out)


if __name__ == "__main__":
    suites.main(main)
