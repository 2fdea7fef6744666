"""Damaged model files, each loaded and asked in a child process: an answer, or one clear error."""

from pathlib import Path

import pytest

from tests.faults.metadata_cases import BYTE_PAIRS
from tests.faults.outcomes import run_in_child

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "share"),
    [("llama-yarn", 1.0), (BYTE_PAIRS, 0.5), ("gpt-oss", 0.3), ("phi3-longrope", 0.3), ("gemma3", 0.3)],
)
def test_metadata_of_wrong_types_and_extreme_values(tmp_path: Path, model: str, share: float) -> None:
    counts = run_in_child("tests.faults.metadata_cases", tmp_path, model, str(share))
    assert counts.total() > 500
    assert counts["ok"] > 100
    assert counts["UnsupportedModelError"] > 100


def test_damaged_weights(tmp_path: Path) -> None:
    counts = run_in_child("tests.faults.tensor_cases", tmp_path, "600")
    assert counts.total() == 600
    assert counts["FormatError"] > 30
    assert counts["ok"] > 100
