"""A described GPU that a model does not fit, and a small model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import edgeinfer
from edgeinfer.loading import engine_loading
from edgeinfer_kernels.cuda import device_parts
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.sizes.model_sizes import PER_LAYER
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner import buffer_sizes, plan_items
from tests.model_zoo import ZOO

MIB = 1 << 20


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> Callable[[int], None]:
    """A GPU of this many bytes, which libraries don't use, next to a CPU that reads a megabyte a second."""
    from edgeinfer.loading import gpu_loading

    def slow(machine: Machine, *_: object) -> Machine:
        return replace(machine, processor=replace(machine.processor, bytes_per_second=1e6))

    monkeypatch.setattr(engine_loading, "with_cpu_speeds", slow)
    monkeypatch.setattr(engine_loading, "measure_gpu", lambda *_: None)

    def set_bytes(nbytes: int) -> None:
        gpu = Gpu(0, "a small GPU", 90, nbytes)
        monkeypatch.setattr(engine_loading, "usable_gpus", lambda _: (gpu,))
        monkeypatch.setattr(device_parts, "free_bytes", lambda _: nbytes)
        for module in (gpu_loading, device_parts):
            monkeypatch.setattr(module, "cuda_device", lambda _: torch.device(device))
        for module in (plan_items, buffer_sizes):
            monkeypatch.setattr(module, "LIBRARY_BYTES", 0)

    return set_bytes


def model_file(folder: Path) -> Path:
    return ZOO["llama"].write(folder / "llama.gguf")


def gpu_bytes(path: Path) -> int:
    """The bytes that the whole model needs on the described GPU."""
    with edgeinfer.load(path, context=64, threads=1) as model:
        assert model.plan is not None
        tables = (each.bytes for each in model.plan.items if (each.item, each.device) == (PER_LAYER, "gpu"))
        return model.plan.bytes_on("gpu") - sum(tables)
