"""One prompt of a divided model, and how long the device was at each kind of work meanwhile."""

from collections.abc import Iterator
from pathlib import Path

from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.loading.loading import load
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer_kernels.cuda.device_work import device_work
from harness.cuda_runs import own_seconds
from harness.split_runs import overhead, placed

HEAD = ("model", "GPU memory", "work", "ms", "calls", "planned ms", "on the GPU")
KINDS = {
    "memcpy htod": "copies to the GPU",
    "memcpy dtoh": "copies from the GPU",
    "unpack_kernel": "unpacking what was sent",
    "dequantize": "dequantizing what is there",
    "grouped_product": "products of experts",
    "gemm": "products",
    "nvjet": "products",
    "cutlass": "products",
    "flash_attention": "attention",
}
"""What is in the name of a piece of work -> what it is."""
WHOLE = "the whole prompt, by the clock"
WARM_UPS, ROUNDS = 2, 5


def phase_rows(path: Path, share: float, tokens: int, threads: int | None) -> Iterator[list[str]]:
    """A row for each kind of work of one prompt, at a budget that is a share of the file's bytes for weights,
    keys and values. Kinds overlap: copies go on while there is computing.
    """
    context, sizes = tokens + 16, model_sizes(path)
    budget = int(share * sizes.nbytes)
    vram = budget + overhead(path, context, "cuda", threads, sizes)
    with load(path, context=context, device="cuda", vram=vram, threads=threads, draft=None) as model:
        assert model.plan is not None
        workload = Workload("prompt", tokens)
        for _ in range(WARM_UPS):
            own_seconds(model, workload)
        seconds = min(own_seconds(model, workload) for _ in range(ROUNDS))
        spent = device_work(lambda: own_seconds(model, workload), KINDS)
        planned, there, name = 1000 * model.plan.prediction.prompt_seconds, placed(model.plan), model.name
    asked = f"{budget / 2**30:.2f} GiB"
    yield [name, asked, WHOLE, f"{1000 * seconds:.2f}", "1", f"{planned:.2f}", there]
    for kind, each in sorted(spent.items(), key=lambda entry: -sum(entry[1])):
        yield [name, asked, kind, f"{1000 * sum(each):.2f}", str(len(each)), "", ""]
