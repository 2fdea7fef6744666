"""Measurements of the machine: thread counts, selection, storage."""

import json
import os
from pathlib import Path

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_offload.machine import measure


def test_few_processors_are_all_used() -> None:
    assert [measure.thread_counts(usable) for usable in (1, 2, 4)] == [[1], [2], [4]]


def test_many_processors_are_tried_in_part_and_in_whole() -> None:
    assert measure.thread_counts(16) == [8, 12, 16]


@pytest.mark.parametrize(
    ("rates", "best"),
    [({8: 50.0, 16: 51.0}, 8), ({8: 50.0, 16: 80.0}, 16), ({8: 50.0, 12: 54.0, 16: 30.0}, 12)],
)
def test_threads_are_added_while_they_read_faster(rates: dict[int, float], best: int) -> None:
    assert measure.best_threads(rates) == best


def test_the_selected_thread_count_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(measure, "load_kernels", lambda folder, isa, progress: None)
    monkeypatch.setattr(measure, "sweep", lambda kernels, usable: {8: 50.0, 12: 80.0, 16: 81.0})
    for name in ("usable_cpus", "fast_cpus"):
        monkeypatch.setattr(measure, name, lambda: 2)
    limit = "; the machine has 32, affinity or a quota allows no more"
    assert measure.select_threads(tmp_path) == measure.ThreadSelection(2, f"all usable processors{limit}")
    for name in ("usable_cpus", "fast_cpus"):
        monkeypatch.setattr(measure, name, lambda: 16)
    result = measure.select_threads(tmp_path)
    assert result.count == 12
    assert result.why == "of 8, 12, 16 the fewest that read memory at full speed, measured once" + limit
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert not measure.select_threads(tmp_path).why.endswith(limit)
    monkeypatch.setattr(measure, "fast_cpus", lambda: 4)
    wanted = "all fast processors; the other 12 are slower cores"
    assert measure.select_threads(tmp_path) == measure.ThreadSelection(4, wanted)


def test_a_measurement_is_made_once_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([2.5e10, 1.0])
    monkeypatch.setattr(measure, "read_bandwidth", lambda folder, threads: next(rates))
    assert [measure.measured_bandwidth(tmp_path, 2) for _ in range(3)] == [2.5e10] * 3


@pytest.mark.parametrize("damage", ["", "[1, 2", "[]", '{"x": "fast"}', '{"machine": 1, "figures": 2}'])
def test_a_damaged_measurement_file_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    (tmp_path / "measured.json").write_text(damage)
    monkeypatch.setattr(measure, "read_bandwidth", lambda folder, threads: 3e10)
    assert measure.measured_bandwidth(tmp_path, 1) == 3e10
    assert 3e10 in json.loads((tmp_path / "measured.json").read_text())["figures"].values()


def test_each_thread_count_has_a_separate_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[int] = []

    def reading(folder: Path, threads: int) -> float:
        requested.append(threads)
        return 1e9 * threads

    monkeypatch.setattr(measure, "read_bandwidth", reading)
    folder = tmp_path / "new" / "cache"
    assert [measure.measured_bandwidth(folder, threads) for threads in (2, 1, 2, 1)] == [2e9, 1e9, 2e9, 1e9]
    assert requested == [2, 1]
    assert {path.name for path in folder.iterdir()} == {"measured.json", "measured.lock"}


@pytest.mark.slow
def test_memory_is_read_at_more_than_a_gigabyte_a_second() -> None:
    assert 1e9 < measure.read_bandwidth(user_folder("cache"), 1) < 1e13
