"""A case of the benchmark of hot neurons with models that are split between device and CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.hot_neurons import comparison
from harness.hot_neurons.comparison import HEAD, Case, Run, reference
from harness.hot_neurons.planted_files import find_planted_model, write_planted
from harness.hot_neurons.time_split import HEAD as TIME_HEAD
from tests.kernels.cuda.offload.conftest import gpu_bytes


@pytest.mark.slow
def test_every_way_of_a_case_runs_split(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_planted(tmp_path, find_planted_model("relu-smoke"), "Q4_0")
    run = Run(None, "cuda", rounds=1, tokens=2, checked=4)
    known = reference(file, file.plant(0.1), run, threads=1, with_exact=False)
    small_gpu(1 << 40)
    whole = gpu_bytes(file.path)
    small_gpu(whole - (1 << 20))
    monkeypatch.setattr(comparison, "overhead", lambda *_: whole)
    monkeypatch.setattr(comparison, "PROMPT", 16)
    rows, times = Case(file, 0.1, 0.5, 2).compare(run, known, {})
    assert [row[HEAD.index("way")] for row in rows] == ["dense", "exact", "predicted"]
    for row in rows:
        cells = dict(zip(HEAD, row, strict=True))
        assert cells["on the GPU"] != "0 of 2 layers"
        assert float(cells["GPU alone ms"]) > 0
        assert float(cells["CPU alone ms"]) > 0
        assert float(cells["max distance"]) < 0.5
    assert [row[TIME_HEAD.index("way")] for row in times] == ["dense", "exact", "predicted"]
    for row in times:
        cells = dict(zip(TIME_HEAD, row, strict=True))
        parts = ("CPU: attention", "CPU: feed-forward", "waiting for the GPU", "rest")
        assert sum(float(cells[part]) for part in parts) == pytest.approx(float(cells["token ms"]), abs=0.01)
        assert (cells["of it predictor"] == "-") == (cells["way"] != "predicted")
