"""Loading a model that doesn't fit a described GPU: its kernels run on the device of the other tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.loading import engine_loading
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError, KernelsUnavailableError
from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
from edgeinfer_offload.planner import buffer_sizes, layer_costs
from edgeinfer_offload.runtime.activity_profile import ActivityProfile, adjacent_profile_path, model_hash
from edgeinfer_offload.runtime.split_backend import SplitBackend
from tests.edgeinfer.lora.random_adapters import write_adapter
from tests.kernels.cuda.offload.conftest import MIB, gpu_bytes, model_file
from tests.model_zoo import ZOO


@contextmanager
def split_and_reference(small_gpu: Callable[[int], None], path: Path) -> Iterator[tuple[Any, Any, int]]:
    """A model on a GPU that it doesn't fit by one byte, the same on the CPU, and the bytes that it would take
    on the GPU.
    """
    small_gpu(1 << 40)
    whole = gpu_bytes(path)
    small_gpu(whole - 1)
    with (
        edgeinfer.load(path, context=64, threads=2) as model,
        edgeinfer.load(path, context=64, threads=2, device="cpu") as reference,
    ):
        engine: Any = model.engine
        assert isinstance(engine.backend, SplitBackend), model.warnings
        assert model.plan is not None
        yield model, reference, whole


def test_a_model_that_does_not_fit_is_split_and_reported(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    with split_and_reference(small_gpu, model_file(tmp_path)) as (model, reference, whole):
        assert any(line.startswith("on the GPU: attention of ") for line in model.details)
        assert 0 < model.plan.bytes_on("gpu") < whole
        assert model.engine.backend.gpu_shard.nbytes <= model.plan.bytes_on("gpu")
        ids = [5, 9, 30, 7, 11]
        actual, expected = model.logits(ids), reference.logits(ids)
        assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)
        completion = model.generate(ids, max_tokens=3, temperature=0.0)
        assert len(completion.ids) == 3


@pytest.mark.slow
def test_a_file_with_grids_is_split_and_its_prompts_are_not_streamed(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    model = replace(ZOO["llama"], width=256, head_dim=64, feed_forward=1024, formats=("IQ3_S",))
    path = model.write(tmp_path / "model.gguf")
    with split_and_reference(small_gpu, path) as (split, reference, _):
        assert split.plan.prediction.stream_min_tokens is None
        ids = list(range(5, 60))
        actual, expected = split.logits(ids), reference.logits(ids)
        assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)


FAMILIES: dict[str, dict[str, Any]] = {
    "bitnet-scales": {},
    "gemma4-per-layer": {"feed_forward": 512},
    "mimo2": {"feed_forward": 512},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_split_has_the_planned_bytes_and_logits(
    small_gpu: Callable[[int], None], tmp_path: Path, name: str
) -> None:
    path = replace(ZOO[name], **FAMILIES[name]).write(tmp_path / "model.gguf")
    with split_and_reference(small_gpu, path) as (model, reference, _):
        if name == "gemma4-per-layer":
            assert {layer.attention for layer in model.plan.layers} == {"gpu"}
        items = [item for item in model.plan.items if item.device == "gpu"]
        shard = model.engine.backend.gpu_shard
        caches = sum(item.bytes for item in items if "keys and values" in item.item)
        assert caches == shard.state_nbytes
        streamed = sum(item.bytes for item in items if item.item == "buffers for streamed weights")
        assert model.plan.bytes_on("gpu") - streamed <= shard.nbytes <= model.plan.bytes_on("gpu")
        ids = [5, 9, 30, 7, 11]
        actual, expected = model.logits(ids), reference.logits(ids)
        assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)
        sampled = [each.generate(ids, max_tokens=4, temperature=0.0).ids for each in (model, reference)]
        assert sampled[0] == sampled[1]


def test_a_gpu_too_small_for_a_layer_leaves_all_to_the_cpu(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    path = model_file(tmp_path)
    small_gpu(MIB // 4)
    with edgeinfer.load(path, context=64, threads=1) as model:
        assert any(warning.startswith("running on the CPU: ") for warning in model.warnings)
    with pytest.raises(GpuUnavailableError):
        edgeinfer.load(path, context=64, threads=1, device="cuda")


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_gpu_filled_during_loading_gets_fewer_layers(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    from edgeinfer.loading import gpu_loading

    path = model_file(tmp_path)
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - (0 if is_whole else 1))
    made: list[tuple[Any, ...]] = []

    def filled_at_first(kind: type[CudaBackend], *arguments: Any, **keywords: Any) -> Any:
        made.append(arguments[4].stages)
        if len(made) == 1:
            raise DeviceMemoryError("asked for 9 MiB and has 1 MiB free")
        return kind(*arguments, **keywords)

    for kind in (CudaBackend, GpuShard):
        monkeypatch.setattr(gpu_loading, kind.__name__, partial(filled_at_first, kind))
    with edgeinfer.load(path, context=64, threads=1) as model:
        assert "other programs took memory of the GPU" in model.warnings[0]
    assert [bool(stages) for stages in made] == [not is_whole, True]


def test_a_gpu_too_full_to_measure_is_planned_without_measurement(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DeviceMemoryError("asked for 256 MiB and has 1 MiB free")

    path = model_file(tmp_path)
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - 1)
    monkeypatch.setattr(engine_loading, "measure_gpu", full)
    with edgeinfer.load(path, context=64, threads=1) as model:
        assert (
            "the GPU has too little free memory to be measured: planned without its speeds" in model.warnings
        )


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["llama", "granitemoe"])
def test_weights_that_fit_neither_device_are_memory_mapped(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # More than these models need: staging buffers, and space for prompts where no weights are streamed.
    monkeypatch.setattr(buffer_sizes, "STAGING_BYTES", 0)
    monkeypatch.setattr(buffer_sizes.BufferSizes, "streams", False)
    path = ZOO[name].write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - (800 << 10))
    result, completions, ram = [], [], None
    for _ in range(2):
        with edgeinfer.load(path, context=64, threads=1, device="cuda", ram=ram) as model:
            engine: Any = model.engine
            assert isinstance(engine.backend, SplitBackend), model.warnings
            assert model.plan is not None
            result.append(model.plan)
            stays = " of the weights are memory-mapped, as "
            assert any(stays in warning for warning in model.warnings) == (ram is not None), model.warnings
            completions.append(model.logits([5 + index for index in range(10)]))
            ram = model.plan.bytes_on("cpu") - 1
    first, second = result
    assert second.bytes_on("cpu") < first.bytes_on("cpu")
    assert first.bytes_on("disk") < second.bytes_on("disk")
    # The placement may differ, and with it the rounding.
    assert np.linalg.norm(completions[1] - completions[0]) < 0.05 * np.linalg.norm(completions[0])


def test_the_cpu_shard_reads_active_neurons_only_if_enabled(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    path = replace(ZOO["arcee"], layers=1, formats=("Q8_0",), feed_forward=1024).write(
        tmp_path / "arcee.gguf"
    )
    small_gpu(1 << 40)
    loading: dict[str, Any] = {"context": 64, "threads": 1, "device": "cuda"}
    with edgeinfer.load(path, sparse="exact", **loading) as model:
        assert "all of the model is on the GPU, which computes every neuron: none is sparse" in model.warnings
    small_gpu(gpu_bytes(path) - (100 << 10))
    logits = []
    for sparse in ("off", "exact"):
        with edgeinfer.load(path, sparse=sparse, **loading) as model:
            engine: Any = model.engine
            assert isinstance(engine.backend, SplitBackend), model.warnings
            assert any(line.startswith("sparse feed-forward in 1 of 1 layers") for line in model.details) == (
                sparse == "exact"
            )
            assert model.plan is not None
            cold = [item for item in model.plan.items if item.item.endswith(", by neuron")]
            assert bool(cold) == (sparse == "exact")
            assert all(item.device == "cpu" and item.weights_read < item.bytes for item in cold)
            logits.append(engine.append([7]))
    assert np.linalg.norm(logits[1] - logits[0]) < 1e-3 * np.linalg.norm(logits[0])


@pytest.mark.slow
def test_a_model_on_a_gpu_gathers_active_neurons_if_that_is_faster(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(ZOO["arcee"], width=128, layers=2, formats=("Q8_0",), feed_forward=1024)
    path = model.write(tmp_path / "arcee.gguf")
    small_gpu(1 << 40)
    logits = []
    for launches in (4, 0):  # a small model is bound by launches
        monkeypatch.setattr(layer_costs, "GATHERED_LAUNCHES", launches)
        with edgeinfer.load(path, context=64, threads=1, device="cuda", sparse="exact") as loaded:
            engine: Any = loaded.engine
            assert loaded.plan is not None
            assert [layer.gathers for layer in loaded.plan.layers] == [launches == 0] * 2
            assert engine.backend.nbytes <= loaded.plan.bytes_on("gpu")
            line = "the GPU reads only the active neurons of 2 of 2 layers"
            assert (line in loaded.details) == (launches == 0)
            logits.append(np.stack([*loaded.logits(list(range(5, 17))), engine.append([7])]))
    assert np.linalg.norm(logits[1] - logits[0]) < 0.01 * np.linalg.norm(logits[0])


def test_sparse_experts_next_to_a_gpu_have_no_expert_cache(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    model = replace(ZOO["smallthinker"], width=256, expert_length=256, formats=("Q8_0",), layers=2)
    path = model.write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - (600 << 10))
    loading: dict[str, Any] = {"context": 64, "threads": 1, "device": "cuda"}
    logits = []
    for sparse in ("off", "exact"):
        with edgeinfer.load(path, sparse=sparse, **loading) as loaded:
            assert loaded.plan is not None
            layers = loaded.plan.layers
            assert any(layer.has_some_experts for layer in layers)
            assert not (sparse == "exact" and any(layer.expert_cache for layer in layers))
            fixed = "the experts on the GPU don't change: sparse ones have no expert cache"
            assert (fixed in loaded.details) == (sparse == "exact")
            by_neuron = [item for item in loaded.plan.items if item.item.endswith(", by neuron")]
            assert bool(by_neuron) == (sparse == "exact")
            logits.append(np.stack([loaded.engine.append([token]) for token in (7, 9)]))
    assert np.linalg.norm(logits[1] - logits[0]) < 0.02 * np.linalg.norm(logits[0])


def test_too_little_main_memory_leaves_all_to_the_cpu_with_memory_mapping(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    path = model_file(tmp_path)
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - 1)
    with edgeinfer.load(path, context=64, threads=1, device="cpu", repack=False) as model:
        assert model.plan is not None
        ram = model.plan.nbytes
    with pytest.raises(GpuUnavailableError) as caught:
        edgeinfer.load(path, context=64, threads=1, device="cuda", ram=ram)
    assert "\n" not in str(caught.value)
    with edgeinfer.load(path, context=64, threads=1, ram=ram) as model:
        assert model.plan is not None
        assert model.plan.bytes_on("cpu") <= ram
        assert any(warning.startswith("running on the CPU: ") for warning in model.warnings)
        assert any(" of the weights are memory-mapped, as " in warning for warning in model.warnings)
    with pytest.raises(OutOfMemoryError) as refused:
        edgeinfer.load(path, context=64, threads=1, ram=1000)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (KernelsUnavailableError("no C compiler"), GpuUnavailableError),
        (BackendError("the GPU failed"), GpuUnavailableError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_or_interrupted_compilation_frees_the_memory(
    small_gpu: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    seen: type[BaseException],
) -> None:
    small_gpu(1 << 40)
    failed: list[CudaBackend] = []

    def fail(backend: CudaBackend, *_: object) -> None:
        failed.append(backend)
        raise failure

    monkeypatch.setattr(CudaBackend, "warm_up", fail)
    with pytest.raises(seen):
        edgeinfer.load(model_file(tmp_path), context=64, device="cuda")
    with pytest.raises(BackendError, match="the model has been closed"):
        failed[0].embed([5])


@pytest.mark.slow
def test_hot_experts_of_a_profile_are_on_the_gpu(small_gpu: Callable[[int], None], tmp_path: Path) -> None:
    path = ZOO["granitemoe"].write(tmp_path / "mixture.gguf")
    small_gpu(1 << 40)
    whole = gpu_bytes(path)
    small_gpu(whole - (800 << 10))
    counts = np.full((2, 8), 20, np.uint32)
    counts[:, 7] = 100
    named = {f"experts.{layer}": counts for layer in range(3)}
    ActivityProfile(model_hash(path), (100, 100), "", named).save(adjacent_profile_path(path))
    with edgeinfer.load(path, context=64, threads=1) as model:
        assert model.plan is not None
        split_layers = [layer.gpu_experts for layer in model.plan.layers if 0 < len(layer.gpu_experts) < 8]
        assert split_layers
        assert all(7 in experts for experts in split_layers)
        completion = model.generate([5, 9, 30], max_tokens=3, temperature=0.0)
        assert completion.speed.gpu_experts is not None
        assert 0 < completion.speed.gpu_experts < 1


@pytest.mark.slow
def test_the_expert_cache_is_used_if_main_memory_holds_all_experts(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeinfer_offload.planner import planner

    monkeypatch.setattr(planner, "MAX_EXPERT_CACHE_SLOWDOWN", 100.0)
    monkeypatch.setattr(buffer_sizes.BufferSizes, "streams", False)  # or the CPU's buffers depend on it
    path = ZOO["granitemoe"].write(tmp_path / "mixture.gguf")
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - (800 << 10))
    with edgeinfer.load(path, context=64, threads=1) as model:
        engine: Any = model.engine
        assert isinstance(engine.backend, SplitBackend), model.warnings
        assert any(line.endswith("the experts change while decoding") for line in model.details)
        assert model.plan is not None
        cached = [layer for layer in model.plan.layers if layer.expert_cache]
        assert cached
        assert all(0 < len(layer.gpu_experts) < layer.experts for layer in cached)
        needed = model.plan.bytes_on("cpu")
        assert len(model.generate([5, 9], max_tokens=3, temperature=0.0).ids) == 3
        gpu_shard: Any = engine.backend.gpu_shard
        assert gpu_shard.changed_experts == 0
    with edgeinfer.load(path, context=64, threads=1, ram=needed - 1) as model:
        assert model.plan is not None
        assert not any(layer.expert_cache for layer in model.plan.layers)
        assert model.plan.relaxations[0].startswith("there is no expert cache")


@pytest.mark.slow
def test_a_split_model_is_loaded_with_an_adapter(small_gpu: Callable[[int], None], tmp_path: Path) -> None:
    path = model_file(tmp_path)
    adapter = write_adapter(path, tmp_path / "adapter.gguf")
    small_gpu(1 << 40)
    loading: Any = {"context": 64, "threads": 1, "lora": adapter}
    with edgeinfer.load(path, **loading) as whole:
        assert whole.plan is not None
        nbytes = whole.plan.bytes_on("gpu")
    small_gpu(nbytes - 1)
    with edgeinfer.load(path, **loading) as model, edgeinfer.load(path, device="cpu", **loading) as reference:
        engine: Any = model.engine
        assert isinstance(engine.backend, SplitBackend), model.warnings
        ids = [5, 9, 30, 7, 11]
        actual, expected = model.logits(ids), reference.logits(ids)
        assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)
        model.set_lora(None)
        assert np.linalg.norm(model.logits(ids) - expected) > 0.1 * np.linalg.norm(expected)
