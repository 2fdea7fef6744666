"""Damaged state files, each used in a child process: they are detected and don't stop a start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.outcomes import run_in_child

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "count"),
    [("snapshots", 1000), ("chats", 500), ("figures", 1000), ("kernels", 1000), ("toml", 1000)],
)
def test_damage_is_detected_or_harmless(
    tmp_path: Path, scaled: Callable[[int], int], kind: str, count: int
) -> None:
    counts = run_in_child("tests.faults.state_cases", tmp_path, kind, str(scaled(count)))
    print(kind, dict(counts))
    assert counts.total() == scaled(count)
    assert counts["ok"] > scaled(count) / 50
