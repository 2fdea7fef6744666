"""The benchmark of models that memory can't hold runs its programs, with and without drafts."""

import argparse
from pathlib import Path

import pytest

from harness.disk.disk_child import ChildOptions
from harness.disk.from_disk import HEAD, measured, rows
from harness.hot_neurons.planted_files import find_planted_model, write_planted
from tests.kernels.system.marks import NEEDS_PREAD


def given(**others: object) -> argparse.Namespace:
    values = {"threads": 2, "how": "mapped,dense", "drafted": False, "shares": "0.8", "tokens": 4}
    return argparse.Namespace(**{**values, "mapped_tokens": 4, "no_cgroup": True, **others})


@pytest.mark.slow
def test_every_way_has_a_row(tmp_path: Path) -> None:
    file = write_planted(tmp_path, find_planted_model("relu-smoke"), "Q4_0")
    file.plant(0.2)
    table = list(rows(file, given(drafted=True)))
    assert [row[2] for row in table][:2] == ["mapped", "dense"]
    assert len(table) == 6
    assert all(len(row) == len(HEAD) and float(row[3]) > 0 for row in table)


@pytest.mark.slow
@NEEDS_PREAD
def test_a_program_that_can_not_load_the_model_says_why(tmp_path: Path) -> None:
    file = write_planted(tmp_path, find_planted_model("relu-smoke"), "Q4_0")
    result = measured(ChildOptions(str(file.path), "predicted", 1 << 20, 2, 4), None)
    assert isinstance(result, str)
    assert "sparse" in result
