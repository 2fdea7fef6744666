"""Stored measurements are valid for the same machine only."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgeinfer_offload.machine import measured_figures
from edgeinfer_offload.machine.measured_figures import MeasuredFigures


def test_only_the_figures_that_were_kept_last_stay(tmp_path: Path) -> None:
    figures = MeasuredFigures(tmp_path, "m", "drafting.json", most=3)
    figures.keep({"a": 1.0, "b": 2.0, "c": 3.0})
    figures.keep({"a": 4.0, "d": 5.0})
    assert MeasuredFigures(tmp_path, "m", "drafting.json").known() == {"c": 3.0, "a": 4.0, "d": 5.0}
    assert MeasuredFigures(tmp_path, "m").known() == {}


def test_measurements_are_stored_and_extended(tmp_path: Path) -> None:
    measurements = MeasuredFigures(tmp_path / "new", "one machine")
    assert measurements.known() == {}
    measurements.keep({"reading": 1e9})
    measurements.keep({"copying": 2e9, "reading": 3e9})
    assert MeasuredFigures(tmp_path / "new", "one machine").known() == {"reading": 3e9, "copying": 2e9}


def test_all_measurements_can_be_deleted(tmp_path: Path) -> None:
    measurements = MeasuredFigures(tmp_path, "one machine")
    measurements.forget()
    measurements.keep({"reading": 1e9})
    measurements.forget()
    assert measurements.known() == {}
    assert measurements.figure("reading", lambda: 2e9) == 2e9


def test_another_machine_or_measurement_version_discards_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MeasuredFigures(tmp_path, "8 cores").keep({"reading": 1e9})
    assert MeasuredFigures(tmp_path, "16 cores").known() == {}
    monkeypatch.setattr(measured_figures, "REVISION", measured_figures.REVISION + 1)
    assert MeasuredFigures(tmp_path, "8 cores").known() == {}
    MeasuredFigures(tmp_path, "8 cores").keep({"copying": 2e9})
    assert MeasuredFigures(tmp_path, "8 cores").known() == {"copying": 2e9}


@pytest.mark.parametrize("stored_file", [{"fast": "very"}, {"reading": 0}, {"reading": float("nan")}, [], 5])
def test_a_changed_file_is_measured_again(tmp_path: Path, stored_file: object) -> None:
    measurements = MeasuredFigures(tmp_path, "m")
    measurements.keep({"reading": 1e9})
    content = json.loads((tmp_path / "measured.json").read_text())
    (tmp_path / "measured.json").write_text(json.dumps(content | {"figures": stored_file}))
    assert measurements.known() == {}
    assert measurements.figure("fast", lambda: 5.0) == 5.0
    assert measurements.known() == {"fast": 5.0}


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b"\xff\xfe", b'{"machine": 1}', b"null", b"1e999"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "measured.json").write_bytes(content)
    assert MeasuredFigures(tmp_path, "m").known() == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names there")
def test_a_pipe_instead_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "measured.json")
    assert MeasuredFigures(tmp_path, "m").known() == {}


def test_a_failed_write_leaves_only_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    MeasuredFigures(tmp_path, "m").keep({"reading": 1e9})
    assert [path.name for path in tmp_path.iterdir()] == ["measured.lock"]


def test_without_a_writable_folder_measurements_last_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    measurements = MeasuredFigures(tmp_path / "file" / "cache", "one machine")
    measurements.keep({"reading": 1e9})
    assert measurements.figure("copying", lambda: 2e9) == 2e9
    assert measurements.known() == {"reading": 1e9, "copying": 2e9}
    measurements.forget()
    assert measurements.known() == {}


def test_figures_that_several_programs_store_at_once_are_all_kept(tmp_path: Path) -> None:
    def store(program: int) -> None:
        figures = MeasuredFigures(tmp_path, "machine")
        for number in range(10):
            figures.keep({f"{program} {number}": float(number)})

    with ThreadPoolExecutor(4) as programs:
        list(programs.map(store, range(4)))
    assert len(MeasuredFigures(tmp_path, "machine").known()) == 40
