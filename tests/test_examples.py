"""The programs in examples/ run on the built-in model and print text."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "structured" in (example.read_text().splitlines() or [""])[0]:
        pytest.importorskip("llguidance")
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(printed.split()) >= 5
    assert example.read_text().startswith('"""')


def test_the_examples_are_found() -> None:
    assert len(EXAMPLES) >= 6
