"""Measured figures live as long as the machine is the same."""

import json
from pathlib import Path

import pytest

from edgeinfer_offload import remembered
from edgeinfer_offload.remembered import RememberedFigures


def test_figures_are_kept_and_added_to(tmp_path: Path) -> None:
    figures = RememberedFigures(tmp_path / "new", "one machine")
    assert figures.known() == {}
    figures.keep({"reading": 1e9})
    figures.keep({"copying": 2e9, "reading": 3e9})
    assert RememberedFigures(tmp_path / "new", "one machine").known() == {"reading": 3e9, "copying": 2e9}


def test_all_can_be_forgotten(tmp_path: Path) -> None:
    figures = RememberedFigures(tmp_path, "one machine")
    figures.forget()
    figures.keep({"reading": 1e9})
    figures.forget()
    assert figures.known() == {}
    assert figures.figure("reading", lambda: 2e9) == 2e9


def test_another_machine_or_another_way_of_measuring_forgets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RememberedFigures(tmp_path, "8 cores").keep({"reading": 1e9})
    assert RememberedFigures(tmp_path, "16 cores").known() == {}
    monkeypatch.setattr(remembered, "REVISION", remembered.REVISION + 1)
    assert RememberedFigures(tmp_path, "8 cores").known() == {}
    RememberedFigures(tmp_path, "8 cores").keep({"copying": 2e9})
    assert RememberedFigures(tmp_path, "8 cores").known() == {"copying": 2e9}


def test_what_is_no_number_is_not_known(tmp_path: Path) -> None:
    figures = RememberedFigures(tmp_path, "m")
    figures.keep({"reading": 1e9})
    content = json.loads((tmp_path / "measured.json").read_text())
    content["figures"] |= {"fast": "very", "right": True}
    (tmp_path / "measured.json").write_text(json.dumps(content))
    assert figures.known() == {"reading": 1e9}
    assert figures.figure("fast", lambda: 5.0) == 5.0


def test_where_nothing_can_be_written_figures_are_known_while_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    figures = RememberedFigures(tmp_path / "file" / "cache", "one machine")
    figures.keep({"reading": 1e9})
    assert figures.figure("copying", lambda: 2e9) == 2e9
    assert figures.known() == {"reading": 1e9, "copying": 2e9}
    figures.forget()
    assert figures.known() == {}
