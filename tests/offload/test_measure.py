"""The bandwidth is measured once a machine and thread count, and remembered."""

import json
from pathlib import Path

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_offload import measure


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Thread counts that have been measured, each as 1e9 bytes a second a thread."""
    asked: list[int] = []

    def reading(folder: Path, threads: int | None = None) -> float:
        assert threads is not None
        asked.append(threads)
        return 1e9 * threads

    monkeypatch.setattr(measure, "read_bandwidth", reading)
    return asked


def test_a_bandwidth_is_measured_once_for_each_number_of_threads(tmp_path: Path, measured: list[int]) -> None:
    folder = tmp_path / "new" / "cache"
    rates = [measure.remembered_bandwidth(folder, threads) for threads in (2, 1, 2, 1)]
    assert rates == [2e9, 1e9, 2e9, 1e9]
    assert measured == [2, 1]
    assert [path.name for path in folder.iterdir()] == ["bandwidth.json"]


@pytest.mark.parametrize("damage", ["", "{", "[1]", '"text"', "\x00"])
def test_a_damaged_memory_is_measured_again(tmp_path: Path, measured: list[int], damage: str) -> None:
    (tmp_path / "bandwidth.json").write_text(damage)
    assert measure.remembered_bandwidth(tmp_path, 2) == 2e9
    assert len(json.loads((tmp_path / "bandwidth.json").read_text())) == 1
    assert measured == [2]


def test_a_rate_that_is_no_number_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    measure.remembered_bandwidth(tmp_path, 2)
    file = tmp_path / "bandwidth.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), "fast")))
    assert measure.remembered_bandwidth(tmp_path, 2) == 2e9
    assert measured == [2, 2]


def test_memory_is_read_at_more_than_a_gigabyte_a_second() -> None:
    assert 1e9 < measure.read_bandwidth(user_folder("cache"), 1) < 1e13
