"""Damaged model files, each loaded and run in a child process: a completion, or one clear error."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.metadata_cases import BYTE_PAIRS, UNIGRAM, WORD_PIECES
from tests.faults.outcomes import run_in_child

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "share"),
    [
        *(("llama-yarn", 1.0), (BYTE_PAIRS, 0.5), (WORD_PIECES, 0.3), (UNIGRAM, 0.3)),
        *(("gpt-oss", 0.3), ("phi3-longrope", 0.3), ("gemma3", 0.3)),
    ],
)
def test_metadata_of_wrong_types_and_extreme_values(
    tmp_path: Path, scaled: Callable[[int], int], model: str, share: float
) -> None:
    run = share * scaled(1000) / 1000
    counts = run_in_child("tests.faults.metadata_cases", tmp_path, model, str(run))
    print(dict(counts))
    assert counts.total() > scaled(500)
    assert counts["ok"] > scaled(100)
    assert counts["UnsupportedModelError"] > scaled(100)


def test_damaged_weights(tmp_path: Path, scaled: Callable[[int], int]) -> None:
    counts = run_in_child("tests.faults.tensor_cases", tmp_path, str(scaled(600)))
    print(dict(counts))
    assert counts.total() == scaled(600)
    assert counts["FormatError"] > scaled(30)
    assert counts["ok"] > scaled(100)
