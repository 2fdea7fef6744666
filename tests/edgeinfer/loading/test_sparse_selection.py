"""Which layers are loaded sparse: by option, by support, by profile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.runtime.abi import TILE_TOKENS
from edgeinfer_offload.runtime.activity_profile import (
    ActivityProfile,
    adjacent_profile_path,
    model_hash,
    save_profile,
)
from tests.model_zoo import ZOO

ARCEE = replace(ZOO["arcee"], width=256, feed_forward=512, formats=("Q8_0",), layers=3)
SPARE = 4096


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return ARCEE.write(tmp_path / "m.gguf")


def profiled(path: Path, active: list[float]) -> None:
    """Save a profile with the active share of each layer's neurons."""
    counts = {
        f"neurons.{layer}": np.full((2, 512), round(1000 * share), np.uint32)
        for layer, share in enumerate(active)
    }
    save_profile(
        ActivityProfile(model_hash(path), (1000, 1000), "not exactly zero", counts), path, path.parent
    )


def sparse_layers(model: edgeinfer.Model) -> list[int]:
    assert isinstance(model.engine, NativeEngine)
    assert isinstance(model.engine.backend, CpuBackend)
    blocks = model.engine.backend.decoder.calls.items()
    return [index.layer for index, calls in blocks if calls[0].kernel.startswith("sparse_")]


def test_exact_mode_gives_the_logits_of_the_dense_model(path: Path) -> None:
    ids = list(range(20, 60))
    result = {}
    for sparse in ("off", "exact"):
        with edgeinfer.load(path, device="cpu", threads=2, sparse=sparse) as model:
            assert sparse_layers(model) == ([0, 1, 2] if sparse == "exact" else [])
            # Fewer tokens than AMX kernels process: a sparse layer has none, and they round differently.
            model.engine.append(ids[: TILE_TOKENS - 1])
            result[sparse] = np.stack([model.engine.append([token]) for token in ids])
    scale = np.abs(result["off"]).max()
    np.testing.assert_allclose(result["exact"], result["off"], rtol=0, atol=1e-5 * scale)


def test_auto_mode_follows_the_profile_per_layer(path: Path) -> None:
    with edgeinfer.load(path, device="cpu") as model:
        assert sparse_layers(model) == []
        assert model.details == ()
    profiled(path, [0.1, 0.9, 0.2])
    with edgeinfer.load(path, device="cpu") as model:
        assert sparse_layers(model) == [0, 2]
        (detail,) = model.details
        assert detail.startswith(
            "sparse feed-forward in 2 of 3 layers: short steps read active neurons only "
        )
        assert detail.endswith("(15%, by its profile)")
    profiled(path, [0.9, 0.9, 0.8])
    with edgeinfer.load(path, device="cpu") as model:
        assert sparse_layers(model) == []
        assert model.details[0].startswith(
            "the feed-forward is dense: reading active neurons only would take 1."
        )
    with edgeinfer.load(path, device="cpu", repack=False) as model:
        assert sparse_layers(model) == []


def test_only_a_request_lets_a_gpu_gather_neurons(path: Path) -> None:
    profiled(path, [0.1, 0.1, 0.1])
    for sparse, layers in (("auto", []), ("exact", [0, 1, 2])):
        with edgeinfer.load(path, device="cpu", sparse=sparse) as model:  # type: ignore[call-overload]
            assert model.plan is not None
            assert model.plan.options.sparse is not None
            assert sorted(model.plan.options.sparse.layers) == [0, 1, 2]
            assert sorted(model.plan.options.sparse.gathered) == layers


def test_a_damaged_profile_is_a_warning_or_an_error_by_mode(path: Path) -> None:
    adjacent_profile_path(path).write_bytes(b"no profile")
    with edgeinfer.load(path, device="cpu") as model:
        assert sparse_layers(model) == []
        assert "the feed-forward is dense: " in model.warnings[0]
        assert "create it again with edgeinfer profile" in model.warnings[0]
    with edgeinfer.load(path, device="cpu", sparse="exact") as model:
        assert sparse_layers(model) == [0, 1, 2]
        assert "not profiled" in model.details[0]
    with pytest.raises(SettingError, match=r"sparse: .*not a valid activity profile"):
        edgeinfer.load(path, device="cpu", sparse="predicted")


def test_invalid_sparse_options_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match="has no predictors; train them with edgeinfer profile --predictor"
    ):
        edgeinfer.load(path, device="cpu", sparse="predicted")
    with pytest.raises(SettingError, match="sparse: 'exact' needs repacked weights"):
        edgeinfer.load(path, device="cpu", sparse="exact", repack=False)
    with pytest.raises(SettingError, match=r"sparse: llama\.cpp doesn't support 'exact'; leave out sparse"):
        edgeinfer.load(path, engine="llama.cpp", sparse="exact")
    with pytest.raises(
        SettingError, match="sparse: saw 'yes', wanted one of 'auto', 'exact', 'predicted', 'off'"
    ):
        edgeinfer.load(path, sparse="yes")  # type: ignore[call-overload]
    llama = ZOO["llama"].write(tmp_path / "llama.gguf")
    line = "no layer of llama can be: its activation is silu, which is never exactly zero"
    with pytest.raises(SettingError, match=line):
        edgeinfer.load(llama, device="cpu", sparse="exact")


def test_sparse_layers_have_the_planned_sizes(path: Path) -> None:
    with edgeinfer.load(path, device="cpu", threads=2, context=100, sparse="exact") as model:
        assert model.plan is not None
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, CpuBackend)
        arrays = model.engine.backend.decoder.arena.arrays
        ours = sum(
            array.nbytes - SPARE for array in arrays if array.dtype == np.uint8 and array.flags.writeable
        )
        planned = model.plan.nbytes - model.engine.cache.nbytes
        assert planned == ours
        in_file = [item for item in model.plan.items if "long steps" in item.item]
        assert [item.item for item in in_file] == [f"layer {i} feed-forward, long steps" for i in range(3)]
        assert sum(item.bytes for item in in_file) == 3 * 256 * 512 // 32 * 34


NEMOTRON = replace(ZOO["nemotron_h_moe"], width=256, expert_length=512, formats=("Q8_0",))


@pytest.mark.slow
def test_experts_are_sparse_by_the_share_of_their_neurons(tmp_path: Path, path: Path) -> None:
    """Without a gate the logits are those of the dense model bit by bit."""
    experts = NEMOTRON.write(tmp_path / "experts.gguf")
    ids = list(range(20, 40))
    logits = []
    for sparse in ("off", "exact"):
        with edgeinfer.load(experts, device="cpu", threads=2, sparse=sparse) as model:
            assert sparse_layers(model) == ([1, 3] if sparse == "exact" else [])
            logits.append(np.stack([model.engine.append([token]) for token in ids]))
    assert np.array_equal(logits[0], logits[1])
    for active, layers in ((100, [1, 3]), (900, [])):
        counts = {f"expert_neurons.{layer}": np.full((2, 8 * 512), active, np.uint32) for layer in (1, 3)}
        made = ActivityProfile(model_hash(experts), (8000, 8000), "not exactly zero", counts)
        assert made.share_in_experts(1, 8, 3) == pytest.approx(active / 3000)
        save_profile(made, experts, tmp_path)
        with edgeinfer.load(experts, device="cpu", threads=2) as model:
            assert sparse_layers(model) == (layers if active == 100 else [1, 3])
    with pytest.raises(SettingError, match="has no predictors"):
        edgeinfer.load(experts, device="cpu", sparse="predicted")


@pytest.mark.slow
def test_sparse_experts_have_the_planned_sizes(tmp_path: Path, path: Path) -> None:
    experts = replace(ZOO["smallthinker"], width=256, expert_length=512, formats=("Q8_0",))
    with edgeinfer.load(
        experts.write(tmp_path / "e.gguf"), device="cpu", threads=2, context=100, sparse="exact"
    ) as model:
        assert model.plan is not None
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, CpuBackend)
        arrays = model.engine.backend.decoder.arena.arrays
        ours = sum(
            array.nbytes - SPARE for array in arrays if array.dtype == np.uint8 and array.flags.writeable
        )
        items = [item for item in model.plan.items if "experts, by neuron" in item.item]
        assert len(items) == experts.layers
        assert all(item.weights_read < item.bytes * 3 / 8 for item in items)
        in_file = [item for item in model.plan.items if "experts, long steps" in item.item]
        assert sum(item.bytes for item in in_file) == experts.layers * 8 * 2 * 256 * 512 // 32 * 34
        assert abs(model.plan.nbytes - model.engine.cache.nbytes - ours) <= 64 * experts.layers


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["relu", "relu2", "drelu"])
def test_a_llama_whose_file_names_a_relu_is_sparse(tmp_path: Path, name: str) -> None:
    model = replace(ZOO["llama"], width=256, feed_forward=512, extra={"hidden_activation": name})
    path = replace(model, formats=("Q8_0",)).write(tmp_path / "m.gguf")
    logits = []
    for sparse in ("off", "exact"):
        with edgeinfer.load(path, device="cpu", threads=2, sparse=sparse) as loaded:
            assert sparse_layers(loaded) == ([0, 1, 2] if sparse == "exact" else [])
            logits.append(np.stack([loaded.engine.append([token]) for token in range(20, 30)]))
    assert np.linalg.norm(logits[1] - logits[0]) < 0.01 * np.linalg.norm(logits[0])


@pytest.mark.slow
def test_a_bitnet_with_a_relu_is_sparse_but_has_no_bundles(tmp_path: Path) -> None:
    model = replace(ZOO["bitnet"], width=256, feed_forward=512, extra={"hidden_activation": "relu2"})
    path = replace(model, formats=("Q8_0",)).write(tmp_path / "m.gguf")
    logits = []
    for sparse in ("off", "exact"):
        with edgeinfer.load(path, device="cpu", threads=2, sparse=sparse) as loaded:
            assert bool(sparse_layers(loaded)) == (sparse == "exact")
            logits.append(np.stack([loaded.engine.append([token]) for token in range(20, 30)]))
    assert np.linalg.norm(logits[1] - logits[0]) < 0.01 * np.linalg.norm(logits[0])
    with pytest.raises(SettingError, match="a norm of its neurons needs all of them at once"):
        edgeinfer.bundle_neurons(path)
