"""Decoding on a GPU against llama.cpp's CUDA build, in turns; the cost of verifying n tokens.

python benchmarks/cuda_decode.py --llama-bench PATH --shapes llama-3-8b,llama-3.2-1b --types Q4_0,Q4_K_M,Q8_0
"""

from edgeinfer.benchmarking.workloads import Workload
from edgeinfer_kernels.sizes.cuda_buffers import EVERY_WIDTH
from harness import cuda_runs, suites


def main() -> None:
    """Run what the command line asks for."""
    parser = cuda_runs.parser(__doc__ or "")
    parser.add_argument("--depths", default="0,512,4096", help="tokens in the cache (%(default)s)")
    options = parser.parse_args()
    suite = cuda_runs.suite(options)
    depths = (0, 16) if options.smoke else suites.whole_numbers("--depths", options.depths, 0)
    tokens = 8 if options.smoke else 128
    wanted = [Workload("generate", tokens, depth) for depth in depths]
    wanted += [Workload("verify", width, 0) for width in EVERY_WIDTH]
    found = list(suite.compare(wanted))
    sections = [
        ("tg, tokens/s", cuda_runs.table([each for each in found if each.workload.kind == "generate"])),
        (
            "Cost of verifying n tokens",
            cuda_runs.widths_table([each for each in found if each.workload.kind == "verify"]),
        ),
    ]
    cuda_runs.publish("Decoding on a GPU", cuda_runs.gpu_name(), suite, sections, options.out)


if __name__ == "__main__":
    suites.main(main)
