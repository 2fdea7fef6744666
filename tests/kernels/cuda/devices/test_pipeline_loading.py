"""Loading a model over two described GPUs that hold it only together: plan and engine agree."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.loading import engine_loading, gpu_loading, pipeline_loading
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer_kernels.cuda import device_parts
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner import buffer_sizes, plan_items
from edgeinfer_offload.runtime.pipeline_backend import PipelineBackend
from edgeinfer_offload.runtime.split_backend import SplitBackend
from tests.kernels.cuda.conftest import HAS_GPU
from tests.model_zoo import ZOO

IDS = [5, 9, 30, 7, 11, 60, 2, 8, 41]
LOADING = {"context": 64, "threads": 1, "draft": None}
BOTH = "cuda:0,cuda:1"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Two GPUs of a terabyte, which libraries don't use, and a CPU that reads a megabyte a second."""
    gpus = [Gpu(index, "NVIDIA GeForce RTX 3090", 86, 1 << 40) for index in range(2)]

    def slow(machine: Machine, *_: object) -> Machine:
        return replace(machine, processor=replace(machine.processor, bytes_per_second=1e6))

    monkeypatch.setattr(engine_loading, "with_cpu_speeds", slow)
    monkeypatch.setattr(engine_loading, "measure_gpu", lambda *_: None)
    monkeypatch.setattr("edgeinfer.planning.gpu_selection.list_gpus", lambda: gpus)
    monkeypatch.setattr(device_parts, "free_bytes", lambda _: 1 << 40)
    for module in (gpu_loading, pipeline_loading, device_parts):
        monkeypatch.setattr(module, "cuda_device", lambda _: torch.device(device))
    for module in (plan_items, buffer_sizes):
        monkeypatch.setattr(module, "LIBRARY_BYTES", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return replace(ZOO["llama"], layers=4).write(tmp_path / "model.gguf")


def whole_bytes(path: Path) -> int:
    """Bytes of the model on one GPU."""
    with edgeinfer.load(path, device="cuda:0", **LOADING) as model:  # type: ignore[call-overload]
        assert model.plan is not None
        return int(model.plan.bytes_on("gpu"))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.slow
def test_two_budgets_that_hold_a_model_only_together_run_it(path: Path) -> None:
    half = int(0.75 * whole_bytes(path))
    with (
        edgeinfer.load(path, device=BOTH, vram=[half, half], **LOADING) as model,  # type: ignore[call-overload]
        edgeinfer.load(path, device="cuda:1", **LOADING) as one,  # type: ignore[call-overload]
    ):
        engine, plan = model.engine, model.plan
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, PipelineBackend)
        assert plan is not None
        for name, shard in zip(("gpu", "gpu1"), engine.backend.shards, strict=True):
            assert isinstance(shard, CudaBackend)
            assert shard.nbytes == plan.bytes_on(name) <= half
        assert "on 2 GPUs" in plan.explain()
        assert model.details[0].startswith("layers 0-")
        # The second part normalizes its input; one GPU applies that norm to the sums. Their last bits differ,
        # and so may some keys and values, which are rounded to f16.
        rounding = 2e-2 if HAS_GPU else 1e-4
        np.testing.assert_allclose(engine.append_all(IDS), one.engine.append_all(IDS), atol=rounding)
        greedy = {"max_tokens": 6, "temperature": 0.0}
        assert model.generate(IDS, **greedy).ids == one.generate(IDS, **greedy).ids
        sampled = {"max_tokens": 6, "seed": 3}
        assert model.generate(IDS, **sampled).ids == one.generate(IDS, **sampled).ids


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
def test_what_two_gpus_do_not_hold_is_shared_with_the_cpu(path: Path) -> None:
    budgets = [int(share * whole_bytes(path)) for share in (0.5, 0.6)]
    with (
        edgeinfer.load(path, device=BOTH, vram=budgets, **LOADING) as model,  # type: ignore[call-overload]
        edgeinfer.load(path, device="cuda:1", **LOADING) as one,  # type: ignore[call-overload]
    ):
        engine, plan = model.engine, model.plan
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, PipelineBackend)
        first, last = engine.backend.shards
        assert isinstance(first, SplitBackend)
        assert isinstance(last, CudaBackend)
        assert plan is not None
        assert 0.99 * plan.bytes_on("gpu") <= first.gpu_shard.nbytes <= plan.bytes_on("gpu") <= budgets[0]
        assert last.nbytes == plan.bytes_on("gpu1") <= budgets[1]
        assert plan.placement == "split"
        np.testing.assert_allclose(engine.append_all(IDS), one.engine.append_all(IDS), atol=2e-2)
        engine.rewind(5)
        assert len(model.generate(IDS, max_tokens=4, temperature=0.0).ids) == 4


@pytest.mark.usefixtures("two_gpus")
def test_a_model_that_one_gpu_holds_is_on_one(path: Path) -> None:
    with edgeinfer.load(path, device=BOTH, vram=(1 << 10, 1 << 40), **LOADING) as model:  # type: ignore[call-overload]
        assert isinstance(model.engine.backend, CudaBackend)
        assert model.gpu == 1
        assert model.details[0].startswith("all of the model is on cuda:1")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram": (1 << 12, 1 << 12)}, "on several GPUs and the CPU: the model needs .* on the gpu"),
        ({"kv": "f32"}, "kv f32 runs on the CPU only"),
        ({"device": "cuda:0,cuda:7"}, "saw 'cuda:7', wanted cuda:0 to cuda:1"),
    ],
)
def test_what_cannot_run_there_is_refused(path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(GpuUnavailableError, match=message):
        edgeinfer.load(path, **{"device": BOTH, **LOADING, **options})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:0,cpu"}, "device: saw 'cuda:0,cpu', wanted"),
        ({"device": "cuda:0,cuda:0"}, "device: saw 'cuda:0,cuda:0', wanted"),
        ({"device": BOTH, "vram": "1GiB,2GiB,3GiB"}, "vram: saw 3 sizes for device 'cuda:0,cuda:1'"),
        ({"device": "cuda:0", "vram": "1GiB,2GiB"}, "vram: saw 2 sizes for device 'cuda:0'"),
        ({"vram": "1GiB,2GiB"}, "vram: saw 2 sizes for device 'auto'; name the GPUs too"),
        ({"device": BOTH, "vram": "1GiB,x"}, "vram: saw 'x', wanted bytes or a size"),
        ({"device": BOTH, "vram": [None, 1]}, 'vram: saw .*, wanted a size for each GPU, as "8GiB,4GiB"'),
    ],
)
def test_wrong_lists_are_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        edgeinfer.load("tiny", **options)  # type: ignore[call-overload]
