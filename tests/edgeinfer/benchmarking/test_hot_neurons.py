"""The benchmark of hot neurons: planted files have their activity, and every way is measured and compared."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.options.load_options import Sparse
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_quant_formats import GGUFFile
from harness.hot_neurons.comparison import (
    HEAD,
    LLAMA_HEAD,
    REFERENCE_HEAD,
    Case,
    Run,
    reference,
    reference_cells,
    setting_cells,
)
from harness.hot_neurons.planted_files import (
    HOT_COVER,
    HOT_SHARE,
    PlantedFile,
    find_planted_model,
    neuron_probs,
    write_planted,
)
from harness.hot_neurons.quality import forced, greedy
from harness.hot_neurons.time_split import HEAD as TIME_HEAD
from harness.hot_neurons.time_split import time_split

SPARE_BYTES = 4096
RUN = Run(program=None, device="cpu", rounds=1, tokens=2, checked=12)


@pytest.fixture(scope="module", params=["relu-smoke", "relu2-smoke"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlantedFile:
    return write_planted(tmp_path_factory.mktemp("planted"), find_planted_model(request.param), "Q4_0")


@pytest.mark.parametrize("active", [0.05, 0.1, 0.2, 0.5])
def test_the_hottest_neurons_have_the_published_share_of_the_activations(active: float) -> None:
    probs = neuron_probs(11008, active)
    assert probs.mean() == pytest.approx(active, rel=0.01)
    assert (np.diff(probs) <= 0).all()
    covered = probs[: round(HOT_SHARE * len(probs))].sum() / probs.sum()
    assert covered == pytest.approx(HOT_COVER, abs=0.02 if active < 0.3 else 0.3)


def test_without_a_skew_all_neurons_are_equally_hot() -> None:
    np.testing.assert_allclose(neuron_probs(512, 0.3, HOT_SHARE), 0.3, rtol=1e-6)


def test_a_planted_file_is_active_as_planted_while_it_runs(file: PlantedFile) -> None:
    trained = file.plant(0.1)
    found = reference(file, trained, RUN, threads=1, with_exact=True)
    assert found.activity.active == pytest.approx(0.1, abs=0.02)
    assert found.activity.hot_cover == pytest.approx(HOT_COVER, abs=0.05)
    assert found.activity.recall > 0.95
    assert found.exact is not None
    assert found.exact.distance < 1e-4
    assert found.exact.same_best == 1
    assert len(reference_cells(file, 0.1, found)) == len(REFERENCE_HEAD)


def test_another_activity_can_be_planted_in_the_same_file(file: PlantedFile) -> None:
    assert file.plant(0.3).active == pytest.approx(0.3, abs=0.02)
    assert file.plant(0.1).active == pytest.approx(0.1, abs=0.02)


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_a_case_has_a_row_for_each_way(file: PlantedFile) -> None:
    known = reference(file, file.plant(0.1), RUN, threads=1, with_exact=True)
    rows, times = Case(file, 0.1, 0.5, 1).compare(RUN, known, {})
    assert [row[HEAD.index("way")] for row in rows] == ["dense", "exact", "predicted"]
    for row in times:
        cells = dict(zip(TIME_HEAD, row, strict=True))
        parts = sum(float(cells[part]) for part in ("CPU: attention", "CPU: feed-forward", "rest"))
        assert parts == pytest.approx(float(cells["token ms"]), abs=0.01)
        assert (cells["of it predictor"] == "-") == (cells["way"] != "predicted")
        assert cells["waiting for the GPU"] == "-"
    assert all(len(row) == len(HEAD) for row in rows)
    assert [row[HEAD.index("same best")] for row in rows[:2]] == ["100.0%", "100.0%"]


def test_planted_experts_are_active_as_planted_and_have_no_predictor(tmp_path: Path) -> None:
    file = write_planted(tmp_path, find_planted_model("moe-smoke"), "Q4_0")
    known = reference(file, file.plant(0.1), RUN, threads=1, with_exact=True)
    assert known.activity.active == pytest.approx(0.1, abs=0.02)
    assert known.exact is not None
    assert known.exact.same_best == 1
    assert reference_cells(file, 0.1, known)[4:6] == ["-", "-"]
    rows, _ = Case(file, 0.1, 0.5, 1).compare(RUN, known, {})
    assert [row[HEAD.index("way")] for row in rows] == ["dense", "exact"]
    with edgeinfer.load(file.path, device="cpu", context=32, draft=None) as model:
        assert any("(10%, by its profile)" in line for line in model.details)


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_llama_cpp_runs_in_every_setting_of_a_case(file: PlantedFile, tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(
        "#!/bin/sh\n"
        'echo \'[{"n_prompt": 0, "n_gen": 2, "n_depth": 0, "samples_ns": [2000000, 1000000], "cpu_info": "x",'
        ' "backends": "none", "build_commit": "0"}]\'\n'
    )
    program.chmod(0o755)
    file.plant(0.1)
    run = Run(program, device="cpu", rounds=2, tokens=2, checked=4)
    case, theirs = Case(file, 0.1, 0.8, 1), dict[tuple[str, ...], list[float]]()
    rows, _ = case.compare(run, None, theirs)
    settings = setting_cells(case, theirs)
    assert sorted(map(len, theirs.values())) == [2, 4]
    assert [row[LLAMA_HEAD.index("setting")].split()[0] for row in settings] == ["-ngl", "-ngl"]
    assert "-ot blk\\.(0" in settings[1][LLAMA_HEAD.index("setting")]
    assert all(row[HEAD.index("llama.cpp's best")] == "0.500" for row in rows)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(SettingError, match="--shapes: saw 'x', wanted one of relu-7b"):
        find_planted_model("x")


def test_a_file_may_name_a_relu_instead_of_its_architectures_activation(tmp_path: Path) -> None:
    file = write_planted(tmp_path, find_planted_model("relu-smoke"), "Q4_0")
    with GGUFFile.open(file.path) as opened:
        assert opened.metadata["llama.hidden_activation"] == "relu"
    with edgeinfer.load(file.path, device="cpu", context=32, draft=None) as model:
        specs = [layer.blocks[1].block for layer in model.engine.specification.layers]  # type: ignore[attr-defined]
    assert {spec.activation for spec in specs} == {"relu"}


@pytest.mark.parametrize("sparse", ["exact", "predicted"])
def test_a_planted_model_takes_the_planned_bytes(file: PlantedFile, sparse: Sparse) -> None:
    file.plant(0.1)
    with edgeinfer.load(file.path, device="cpu", threads=2, context=64, draft=None, sparse=sparse) as model:
        engine, plan = model.engine, model.plan
        assert plan is not None
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, CpuBackend)
        arrays = [array for array in engine.backend.decoder.arena.arrays if array.flags.writeable]
        ours = sum(array.nbytes - SPARE_BYTES for array in arrays if array.dtype == np.uint8)
        assert plan.nbytes - engine.cache.nbytes == ours


def test_the_measured_predictor_is_as_before(file: PlantedFile) -> None:
    file.plant(0.1)
    with edgeinfer.load(file.path, device="cpu", context=32, draft=None, sparse="predicted") as model:
        ids, logits = greedy(model, 8)
        split = time_split(model, ids, None)
        assert split is not None
        assert split.predictor is not None
        assert np.array_equal(forced(model, ids), logits)
