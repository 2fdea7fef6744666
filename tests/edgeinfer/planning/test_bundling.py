"""A model that memory can't hold reads its active neurons from a bundle file, as the plan says."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.options import LoadKeywords
from edgeinfer.planning.model_plan import plan_model
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.runtime.bundle_file import bundle_path
from tests.kernels.system.marks import NEEDS_PREAD
from tests.model_zoo import ZOO

Sparse = Literal["exact", "off"]
ARCEE = replace(ZOO["arcee"], width=512, feed_forward=4096, formats=("Q8_0",), layers=3)
IDS = list(range(20, 32))
CONTEXT = 64


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return ARCEE.write(tmp_path / "m.gguf")


def planned(path: Path, ram: int | None = None, sparse: Sparse = "exact") -> MemoryPlan:
    return plan_model(path, **options(ram, sparse)).plan


def options(ram: int | None, sparse: Sparse) -> LoadKeywords:
    return LoadKeywords(
        device="cpu", threads=2, context=CONTEXT, ram=ram, sparse=sparse, draft=None, parallel=1
    )


def too_little(path: Path) -> int:
    """Bytes that hold all but half of the neurons of one layer of three."""
    down = next(item for item in planned(path, sparse="off").items if "feed-forward" in item.item)
    return planned(path).bytes_on("cpu") - 3 * down.bytes // 4


def logits(model: edgeinfer.Model) -> npt.NDArray[np.float32]:
    return np.stack([model.engine.append([token]) for token in IDS])


def backend(model: edgeinfer.Model) -> CpuBackend:
    assert isinstance(model.engine, NativeEngine)
    assert isinstance(model.engine.backend, CpuBackend)
    return model.engine.backend


@pytest.mark.slow
@NEEDS_PREAD
def test_active_neurons_are_read_from_disk_with_the_logits_of_the_model_in_memory(path: Path) -> None:
    ram = too_little(path)
    assert edgeinfer.bundle_neurons(path) == bundle_path(path)
    with edgeinfer.load(path, **options(None, "exact")) as model:
        expected = logits(model)
        assert backend(model).decoder.windows is None
    with edgeinfer.load(path, **options(ram, "exact")) as model:
        assert np.array_equal(logits(model), expected)
        windows = backend(model).decoder.windows
        assert windows is not None
        assert model.plan is not None
        sparse = model.plan.options.sparse
        assert sparse is not None
        slots = sparse.window_slots
        assert {window.args.slot_count for window in windows.windows.values()} == {slots}
        assert 64 <= slots < 4096
        assert any(f"{slots} of 4096 neurons of each layer are held in memory" in d for d in model.details)
        assert model.plan.bytes_on("cpu") <= ram
        (own,) = {item.bytes for item in model.plan.items if "from disk" in item.item}
        assert slots * windows.windows[0].slot_bytes < own


@NEEDS_PREAD
def test_plan_and_load_read_the_same_neurons_from_disk(path: Path) -> None:
    ram = too_little(path)
    edgeinfer.bundle_neurons(path)
    plan = planned(path, ram)
    assert plan.options.sparse is not None
    with edgeinfer.load(path, **options(ram, "exact")) as model:
        assert model.plan is not None
        assert [(i.item, i.device, i.bytes) for i in model.plan.items] == [
            (i.item, i.device, i.bytes) for i in plan.items
        ]
        assert model.plan.options.sparse == plan.options.sparse
    assert [item.bound for item in plan.items if "from disk" in item.item] == ["disk"] * 3
    assert plan.explain().startswith("Doesn't fit. Active neurons are read from disk, ")
    assert f"{plan.options.sparse.window_slots} neurons of each layer are in memory" in plan.explain()


def test_without_bundles_a_sparse_model_that_does_not_fit_is_refused(path: Path) -> None:
    ram = too_little(path)
    with pytest.raises(EdgeInferError, match="take a smaller model or fewer bits per weight"):
        edgeinfer.load(path, **options(ram, "exact"))


@pytest.mark.slow
@NEEDS_PREAD
def test_bundles_of_another_model_are_not_used(path: Path, tmp_path: Path) -> None:
    ram = too_little(path)
    other = replace(ARCEE, layers=4).write(tmp_path / "other.gguf")
    os.rename(edgeinfer.bundle_neurons(other), bundle_path(path))
    with pytest.raises(EdgeInferError, match="it again with edgeinfer quantize --bundle"):
        edgeinfer.load(path, **options(ram, "exact"))


@pytest.mark.default_cases(2)
@NEEDS_PREAD
@pytest.mark.parametrize("damage", [b"", b"GGUF" + bytes(40), bytes(64)])
def test_a_damaged_bundle_file_is_named(path: Path, damage: bytes) -> None:
    ram = too_little(path)
    bundle_path(path).write_bytes(damage)
    with pytest.raises(EdgeInferError, match=r"m\.gguf\.bundles: .*edgeinfer quantize --bundle"):
        edgeinfer.load(path, **options(ram, "exact"))


def test_a_model_without_relu_has_no_bundles(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "m.gguf")
    with pytest.raises(SettingError, match="bundle: no layer of m can be read by neurons: its activation"):
        edgeinfer.bundle_neurons(path)
    assert not bundle_path(path).exists()
