"""The device's work, by kind, during a prompt that streams the CPU's weights.

python benchmarks/streamed_prompts.py --models llama-3-8b:32:Q4_0,qwen3-30b-a3b:10:Q4_0 --shares 0.25,0.75
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.loading import gpu_loading
from edgeinfer.loading.loading import load
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer_kernels.cuda.device_work import device_work
from edgeinfer_kernels.cuda.driver import list_gpus
from harness import suites
from harness.cuda_runs import workload_seconds
from harness.split_runs import overhead, placed

HEAD = ("model", "GPU memory", "work", "ms", "calls", "planned ms", "on the GPU")
KINDS = {
    "memcpy htod": "copies to the GPU",
    "memcpy dtoh": "copies from the GPU",
    "unpack_kernel": "unpacking streamed weights",
    "dequantize": "dequantizing resident weights",
    "grouped_product": "matmuls of experts",
    "gemm": "products",
    "nvjet": "products",
    "cutlass": "products",
    "flash_attention": "attention",
}
"""Substring of an operation's name -> kind of work."""
WHOLE = "the whole prompt, wall time"
WARM_UPS, ROUNDS = 2, 5


def phase_rows(path: Path, share: float, tokens: int, threads: int | None) -> Iterator[list[str]]:
    """A row for each kind of work of one prompt, at a budget that is a share of the file's weights,
    keys and values. Kinds overlap: copies continue during computation.
    """
    context, sizes = tokens + 16, model_sizes(path)
    budget = int(share * sizes.nbytes)
    vram = budget + overhead(path, context, "cuda", threads, sizes)
    with load(path, context=context, device="cuda", vram=vram, threads=threads, draft=None) as model:
        assert model.plan is not None
        workload = Workload("prompt", tokens)
        for _ in range(WARM_UPS):
            workload_seconds(model, workload)
        seconds = min(workload_seconds(model, workload) for _ in range(ROUNDS))
        spent = device_work(lambda: workload_seconds(model, workload), KINDS)
        planned, there, name = 1000 * model.plan.prediction.prompt_seconds, placed(model.plan), model.name
    shown = f"{budget / 2**30:.2f} GiB"
    yield [name, shown, WHOLE, f"{1000 * seconds:.2f}", "1", f"{planned:.2f}", there]
    for kind, each in sorted(spent.items(), key=lambda entry: -sum(entry[1])):
        yield [name, shown, kind, f"{1000 * sum(each):.2f}", str(len(each)), "", ""]


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3-8b:32:Q4_0", help="shape:layers:type (%(default)s)")
    parser.add_argument("--shares", default="0.5", help="budgets, as shares of the weights (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: those that read fastest)")
    parser.add_argument("--folder", type=Path, help="folder that keeps the model files (default: none)")
    parser.add_argument(
        "--smoke", action="store_true", help="two layers of a small model, to check that the program runs"
    )
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU: no weights are streamed", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.tokens = "llama-3.2-1b:2:Q4_0", 64
    gpu_loading.TUNING_SECONDS = 1.0
    shares = suites.shares(options.shares)
    rows: list[list[str]] = []
    for path in suites.written_shapes(suites.words(options.models), options.folder):
        for share in shares:
            rows += phase_rows(path, share, options.tokens, options.threads)
    print(markdown(HEAD, rows, left=(0, 2)))


if __name__ == "__main__":
    suites.main(main)
