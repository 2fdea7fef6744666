"""`edgeinfer bench`: tables, formats and refusals; never a time."""

import csv
import io
import json
from pathlib import Path

import pytest

from edgeinfer.benchmarking import random_files, speed_runs
from edgeinfer.shapes.known_shapes import SHAPES
from edgeinfer.shapes.shape import Shape
from tests.tui.conftest import CommandLine

QUICK = ("--prompt-tokens", "8", "--max-tokens", "2", "-r", "2")


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory bandwidth need not be measured here."""
    monkeypatch.setattr(speed_runs, "read_bandwidth", lambda folder, threads: 1e10)


def test_a_table_and_the_machine_go_to_stdout(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("bench", "tiny", *QUICK, "-t", "1,2")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    assert [row[3:5] for row in cells] == [["1", "pp8"], ["1", "tg2"], ["2", "pp8"], ["2", "tg2"]]
    assert all(row[0] == "tiny" and " ± " in row[5] for row in cells)
    assert [line.partition(":")[0] for line in lines[7:]] == ["machine", "versions", "date", "command"]


@pytest.mark.slow
def test_json_holds_every_repetition(edgeinfer: CommandLine) -> None:
    for expected in (("--json",), ("--output", "json")):
        report = json.loads(edgeinfer("bench", *QUICK, "-t", "1", "-d", "0", "-d", "4", *expected).out)
        assert [row["test"] for row in report["results"]] == ["pp8", "tg2", "pp8 @ d4", "tg2 @ d4"]
        assert all(len(row["seconds"]) == 2 for row in report["results"])
        assert report["parameters"] == 31_730_176


def test_csv_has_a_line_for_each_test(edgeinfer: CommandLine) -> None:
    rows = list(csv.DictReader(io.StringIO(edgeinfer("bench", *QUICK, "-t", "1", "-o", "csv").out)))
    assert [row["test"] for row in rows] == ["pp8", "tg2"]
    assert float(rows[0]["tokens_per_second"]) > 0


@pytest.mark.slow
def test_a_test_beyond_the_trained_context_gets_a_larger_context(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer(
        "bench", "--prompt-tokens", "0", "--max-tokens", "1", "-r", "1", "-d", "1024", "-t", "1", "--json"
    )
    assert json.loads(outcome.out)["results"][0]["test"] == "tg1 @ d1024"


@pytest.mark.slow
@pytest.mark.llama_cpp
def test_versus_llama_cpp_prints_both_engines(edgeinfer: CommandLine) -> None:
    pytest.importorskip("llama_cpp")
    report = json.loads(edgeinfer("bench", *QUICK, "-t", "1", "--vs", "llama.cpp", "--json").out)
    assert len(report["results"][0]["llama.cpp"]["seconds"]) == 10
    table = edgeinfer(
        "bench", "--prompt-tokens", "4", "--max-tokens", "0", "-t", "1", "--vs", "llama.cpp"
    ).out
    assert "best decile t/s" in table.splitlines()[0]
    assert table.splitlines()[2].count("x |") == 2


def test_versus_without_llama_cpp_gives_a_one_line_error(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    outcome = edgeinfer("bench", *QUICK, "--vs", "llama.cpp")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "edgeinfer: --vs llama.cpp needs llama-cpp-python: pip install 'edgeinfer[llama-cpp]'\n"
    )


def test_a_shape_is_written_to_the_cache_and_measured(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SHAPES, "small", Shape("small", 2, 256, 512, 4, 2, 600, 128))
    monkeypatch.setattr(random_files, "random_files_folder", lambda: tmp_path)
    outcome = edgeinfer("bench", "--shape", "small", "--type", "q8_0", *QUICK, "-t", "1", "--json")
    report = json.loads(outcome.out)
    assert report["model"] == "small-Q8_0-random-3"
    assert [path.name for path in tmp_path.rglob("*.gguf")] == ["small-Q8_0-random-3.gguf"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt-tokens", "x"], 2, "--prompt-tokens: saw 'x', wanted whole numbers of at least 0, as 1,2"),
        (["--threads", "0"], 2, "--threads: saw '0', wanted whole numbers of at least 1, as 1,2"),
        (
            ["--prompt-tokens", "0", "--max-tokens", "0"],
            2,
            "--prompt-tokens and --max-tokens are both 0: nothing to measure",
        ),
        (["--shape", "tinyllama-1.1b"], 2, "--shape and --type go together"),
        (
            ["tiny", "--shape", "a", "--type", "Q4_0"],
            2,
            "saw the model 'tiny' and --shape a; drop one of them",
        ),
        (["--shape", "a", "--type", "Q4_0"], 1, "shape: saw 'a', wanted one of "),
        (["--shape", "tinyllama-1.1b", "--type", "Q9"], 1, "type Q9 is unknown; wanted one of F32"),
        (["nowhere"], 1, "nowhere: no such model"),
    ],
)
def test_an_invalid_benchmark_gives_a_one_line_error(
    edgeinfer: CommandLine, arguments: list[str], code: int, message: str
) -> None:
    outcome = edgeinfer("bench", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith(f"edgeinfer: {message}")
    assert outcome.err.count("\n") == 1
