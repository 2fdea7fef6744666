"""One prompt of a divided model, and how long the device was at each kind of work meanwhile."""

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from edgeinfer.benchmarking.cuda_runs import own_seconds
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.loading.loading import load
from edgeinfer_offload.memory_plan import MemoryPlan

HEAD = ("model", "GPU memory", "work", "ms", "calls", "planned ms")
KINDS = {
    "memcpy htod": "copies to the GPU",
    "memcpy dtoh": "copies from the GPU",
    "unpack_kernel": "unpacking what was sent",
    "dequantise": "dequantising what is there",
    "grouped_product": "products of experts",
    "gemm": "products",
    "nvjet": "products",
    "cutlass": "products",
    "flash_attention": "attention",
}
"""What is in the name of a piece of work -> what it is."""
WHOLE = "the whole prompt, by the clock"


def phase_rows(path: Path, share: float, tokens: int, threads: int | None) -> Iterator[list[str]]:
    """A row for each kind of work of one prompt, the file at a budget that is a share of its layers' bytes
    beside what libraries and buffers take. Kinds overlap: copies go on while there is computing.
    """
    context = tokens + 16
    with load(path, context=context, device="cuda", draft=None) as there:
        assert there.plan is not None
        fixed, whole = _fixed(there.plan), there.plan.bytes_on("gpu")
        name = there.name
    vram = int(fixed + share * (whole - fixed))
    with load(path, context=context, device="cuda", vram=vram, threads=threads, draft=None) as model:
        assert model.plan is not None
        workload = Workload("prompt", tokens)
        for _ in range(2):
            own_seconds(model, workload)
        seconds = min(own_seconds(model, workload) for _ in range(3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            own_seconds(model, workload)
            time.sleep(0.01)
        planned = 1000 * model.plan.prediction.prompt_seconds
    budget = f"{vram / 2**30:.2f} GiB"
    yield [name, budget, WHOLE, f"{1000 * seconds:.2f}", "1", f"{planned:.2f}"]
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        lowered = event.name.lower()
        kind = next((kind for word, kind in KINDS.items() if word in lowered), "everything else")
        spent[kind].append(event.device_time / 1000)
    for kind, each in sorted(spent.items(), key=lambda entry: -sum(entry[1])):
        yield [name, budget, kind, f"{sum(each):.2f}", str(len(each)), ""]


def _fixed(plan: MemoryPlan) -> int:
    """What is on the GPU beside the model's layers."""
    return sum(item.bytes for item in plan.items if item.device == "gpu" and item.layer is None)
