"""Loading a model with a part of every layer on each of two GPUs: plan, ids, snapshots, refusals."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import DeviceError, SettingError
from edgeinfer.loading import engine_loading, gpu_loading
from edgeinfer.loading.tensor import loading as tensor_loading
from edgeinfer.planning import several_gpus
from edgeinfer.planning.device_plan import plan_devices
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.parallel_sequences import WHOLE_CACHES
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.planned_devices import DevicePlan
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda import device_parts
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.machine.peer_sums import NVLINK, sum_figures
from edgeinfer_offload.planner import buffer_sizes, plan_items
from edgeinfer_offload.planner.several_gpus import tensor_plan
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_offload.runtime.tensor_backend import TensorBackend
from tests.edgeinfer.lora.random_adapters import write_adapter
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.devices.test_tensor_parallel import MODULE
from tests.model_zoo import ZOO

IDS = [5, 9, 30, 7, 11, 60, 2, 8, 41]
LOADING = {"context": 64, "threads": 1, "draft": None}
Measured = Callable[[Machine], Machine]
TENSOR = {**LOADING, "device": "cuda:0,cuda:1", "split": "tensor"}
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU: the ranks need one each")


def own_device(index: int) -> torch.device:
    return torch.device("cuda", index) if HAS_GPU else torch.device("cpu")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of a terabyte that NVLink connects, which libraries don't use."""
    gpus = [Gpu(index, "NVIDIA GeForce RTX 3090", 86, 1 << 40) for index in range(2)]
    monkeypatch.setattr(engine_loading, "measure_gpu", lambda *_: None)
    monkeypatch.setattr(engine_loading, "measured_sums", lambda *_: NVLINK)
    monkeypatch.setattr("edgeinfer.planning.gpu_selection.list_gpus", lambda: gpus)
    monkeypatch.setattr(device_parts, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(tensor_loading, "RANK_MODULE", MODULE)
    for module in (gpu_loading, tensor_loading, device_parts):
        monkeypatch.setattr(module, "cuda_device", own_device)
    for module in (plan_items, buffer_sizes):
        monkeypatch.setattr(module, "LIBRARY_BYTES", 0)
    monkeypatch.setattr(tensor_plan, "RANK_BYTES", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("started_ranks")
def test_both_gpus_generate_what_one_does(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    loaded: list[int] = []
    with (
        edgeinfer.load(path, **TENSOR, progress=lambda done, _: loaded.append(done)) as model,  # type: ignore[call-overload]
        edgeinfer.load(path, device="cuda:0", **LOADING) as one,  # type: ignore[call-overload]
    ):
        engine, plan = model.engine, model.plan
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, TensorBackend)
        assert plan is not None
        words = MAX_TOKENS * (64 + engine.vocabulary_size // 2) * (4 + 2 * 16)  # of sums and logits
        sums = words + 2 * 4 * plan.options.chunk * 64  # which only GPUs with NVLink have
        for name, rank in zip(("gpu", "gpu1"), engine.backend.ranks, strict=True):
            assert 0.97 * (plan.bytes_on(name) - sums) <= rank.nbytes <= plan.bytes_on(name)
        assert "on 2 GPUs" in plan.explain()
        assert model.details[0].startswith("50% of every layer on ")
        assert len(loaded) > 2
        logits, expected = engine.append_all(IDS), one.engine.append_all(IDS)
        np.testing.assert_allclose(logits, expected, atol=2e-2)
        for settings in ({"temperature": 0.0}, {"seed": 3}):
            found, wanted = (each.generate(IDS, max_tokens=6, **settings).ids for each in (model, one))
            assert found == wanted
        process_ids = engine.backend.processes.process_ids
        os.kill(process_ids[0], signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"the process of .* \(cuda:0\) ended by signal 9; load the"):
            model.generate(IDS, max_tokens=6)
        assert engine.backend.processes.process_ids == []


@pytest.mark.slow
def test_several_requests_run_together_on_both_gpus(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    prompts = [IDS, IDS[::-1] * 2, [7]]
    with (
        edgeinfer.load(path, parallel=2, **TENSOR) as model,  # type: ignore[call-overload]
        edgeinfer.load(path, device="cuda:0", **LOADING) as one,  # type: ignore[call-overload]
    ):
        plan = model.plan
        assert plan is not None
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, TensorBackend)
        assert plan.options.sequences == 2
        for name, rank in zip(("gpu", "gpu1"), model.engine.backend.ranks, strict=True):
            assert rank.nbytes <= plan.bytes_on(name)
        for settings in ({"temperature": 0.0}, {"seed": 3}):
            found = model.generate(prompts, max_tokens=4, **settings)
            wanted = [one.generate(prompt, max_tokens=4, **settings) for prompt in prompts]
            assert [each.ids for each in found] == [each.ids for each in wanted]


@pytest.mark.slow
def test_a_draft_model_shares_the_gpu_with_the_smaller_share(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    budgets = 1 << 30, 1 << 29
    options = {**TENSOR, "draft": path, "vram": budgets}
    with (
        edgeinfer.load(path, **options) as model,  # type: ignore[call-overload]
        edgeinfer.load(path, device="cuda:0", **LOADING) as one,  # type: ignore[call-overload]
    ):
        assert model.plan is not None
        assert isinstance(model.plan, TensorPlan)
        smaller = int(np.argmin(np.array(model.plan.shares) / budgets))
        assert model.plan.draft == ("gpu", "gpu1")[smaller]
        assert model.gpu == smaller
        always_draft(model, 3)
        found, wanted = (each.generate(IDS, max_tokens=8, temperature=0.0) for each in (model, one))
        assert found.ids == wanted.ids
        assert found.speed.accepted_share is not None
        assert found.speed.accepted_share > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2moe"])
def test_adapters_on_both_gpus_are_those_of_one(name: str, tmp_path: Path) -> None:
    path = replace(ZOO[name], layers=2).write(tmp_path / "model.gguf")
    names = ("attn_", "ffn_up", "ffn_down", "ffn_gate", "output.weight", "token_embd")
    adapter = write_adapter(path, tmp_path / "lora.gguf", names=names)
    with (
        edgeinfer.load(path, lora=adapter, **TENSOR) as model,  # type: ignore[call-overload]
        edgeinfer.load(path, lora=adapter, device="cuda:0", **LOADING) as one,  # type: ignore[call-overload]
    ):
        adapted = one.engine.append_all(IDS)
        np.testing.assert_allclose(model.engine.append_all(IDS), adapted, atol=2e-2)
        for each in (model, one):
            each.set_lora(None)
        plain = one.engine.append_all(IDS)
        np.testing.assert_allclose(model.engine.append_all(IDS), plain, atol=2e-2)
        assert np.abs(adapted - plain).max() > 0.1


@pytest.mark.parametrize("split", ["auto", pytest.param("layers", marks=pytest.mark.slow)])
def test_a_model_that_fits_one_gpu_takes_adapters_and_a_draft_model_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    options = {**TENSOR, "split": split, "draft": path, "parallel": 2}
    with edgeinfer.load(path, **options) as model:  # type: ignore[call-overload]
        assert model.plan is not None
        assert model.plan.draft == "gpu"
        assert model.plan.options.sequences == 2
        assert any(line.startswith("all of the model is on cuda:0") for line in model.details)
        assert model.speculator is not None
        assert model.generate(IDS, max_tokens=6, temperature=0.0).ids


def test_a_detail_of_the_selected_gpu_is_shown_once(tmp_path: Path) -> None:
    path = replace(ZOO["gemma3"], layers=2).write(tmp_path / "model.gguf")
    options = {**LOADING, "device": "auto", "context": 4096, "parallel": 2}
    with edgeinfer.load(path, **options) as model:  # type: ignore[call-overload]
        assert model.details.count(WHOLE_CACHES) == 1
        assert sum(line.startswith("all of the model is on cuda:0") for line in model.details) == 1


def test_auto_uses_every_usable_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    asked: list[tuple[int, ...]] = []

    def plan(request: PlanRequest, machine: Machine, measured: Measured) -> DevicePlan:
        asked.append(tuple(gpu.index for gpu in machine.gpus))
        return plan_devices(request, machine, measured)

    monkeypatch.setattr(engine_loading, "plan_devices", plan)
    options = {**LOADING, "device": "auto"}
    with edgeinfer.load(path, **options) as model:  # type: ignore[call-overload]
        assert asked[0] == (0, 1)
        assert any(line.startswith("all of the model is on cuda:0") for line in model.details)
    with pytest.raises(SettingError, match="vram: saw 3 sizes for device 'auto'"):
        edgeinfer.load(path, vram=(1, 2, 3), **options)  # type: ignore[call-overload]


@pytest.mark.slow
def test_sums_are_measured_by_a_process_for_each_device() -> None:
    figures = sum_figures([str(own_device(index)) for index in range(2)])
    assert 0 < figures["sum_seconds"] < 10
    assert figures["bytes_per_second"] > 0
    assert HAS_GPU or figures["symmetric"] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("olmo2", {}, "tensor parallel: .* a norm of all heads .layer 0.; take split='layers'"),
        ("llama", {"vram": (1 << 12, 1 << 12)}, "tensor parallel: the model needs .* on the gpu"),
        ("llama", {"kv": "f32"}, "kv f32 runs on the CPU only"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_the_plan(
    name: str, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    with pytest.raises(GpuUnavailableError, match=message):
        edgeinfer.load(path, **{**TENSOR, **options})  # type: ignore[call-overload]


def test_processes_that_fail_to_exchange_sums_are_named_or_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BackendError("the process of cuda:1 ended with status 1: no link")

    monkeypatch.setattr(engine_loading, "measured_sums", fail)
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    with pytest.raises(GpuUnavailableError, match=r"tensor parallel: the process of cuda:1 .*: no link"):
        edgeinfer.load(path, **TENSOR)  # type: ignore[call-overload]
    with edgeinfer.load(path, **{**TENSOR, "split": "auto"}) as model:  # type: ignore[call-overload]
        assert model.warnings[0].startswith("no tensor parallel: the process of cuda:1 ended")


def test_ranks_that_fail_to_load_are_named_or_layers_are_loaded_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_loading, "RANK_MODULE", "tests.no_such_module")
    monkeypatch.setattr(several_gpus, "MAX_TENSOR_RATIO", 1e9)
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    with pytest.raises(GpuUnavailableError, match=r"the process of .* with status 1: .*No module named"):
        edgeinfer.load(path, **TENSOR)  # type: ignore[call-overload]
    with edgeinfer.load(path, **{**TENSOR, "split": "auto"}) as model:  # type: ignore[call-overload]
        assert model.warnings[0].startswith("no tensor parallel: ")
        assert not isinstance(model.engine.backend, TensorBackend)


def test_a_kind_of_split_is_for_several_gpus(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    with pytest.raises(SettingError, match="split: saw 'tensor' for device 'cpu'; name several GPUs"):
        edgeinfer.load(path, device="cpu", split="tensor")


def test_without_sums_it_is_refused_or_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loading, "measured_sums", lambda *_: None)
    path = replace(ZOO["llama"], layers=2).write(tmp_path / "model.gguf")
    with pytest.raises(GpuUnavailableError, match="it takes Linux, and torch with NCCL"):
        edgeinfer.load(path, **TENSOR)  # type: ignore[call-overload]
    with edgeinfer.load(path, **{**TENSOR, "split": "auto"}) as model:  # type: ignore[call-overload]
        assert not isinstance(model.engine.backend, TensorBackend)
