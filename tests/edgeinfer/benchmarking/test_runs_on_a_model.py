"""The built-in model through every measurement; results are complete, whatever the time."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.benchmarking import speed_runs
from edgeinfer.benchmarking.bench_targets import bytes_per_token
from edgeinfer.benchmarking.speed_runs import BenchedModel, BenchSettings, measure_speed, measure_versus
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.errors import EdgeInferError, SettingError
from harness import suites
from harness.startup import StartupPhases, commands, reading
from harness.token_time import token_time

WORKLOADS = [Workload("prompt", 12, 4), Workload("generate", 2), Workload("verify", 3)]


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory bandwidth need not be measured here."""
    monkeypatch.setattr(speed_runs, "read_bandwidth", lambda folder, threads: 1e10)


def test_every_workload_and_thread_count_gives_a_row() -> None:
    received: list[str] = []
    settings = BenchSettings(
        WORKLOADS, [1, 2], repetitions=2, report=lambda label, done, total: received.append(label)
    )
    rows = list(measure_speed(BenchedModel.find("tiny"), settings))
    assert [(row.workload, row.threads) for row in rows] == [(w, t) for t in (1, 2) for w in WORKLOADS]
    assert received[0] == "pp12 @ d4, 1 threads:"
    assert all(len(row.timings.seconds) == 2 for row in rows)
    assert rows[0].gigabytes_per_second is None
    assert rows[0].seconds_to_first_token == rows[0].timings.mean_seconds
    generated = rows[1]
    rate = generated.timings.mean_rate * generated.bytes_per_token / 1e9
    assert generated.gigabytes_per_second == pytest.approx(rate)
    assert generated.bandwidth_share == pytest.approx(rate / 10)
    assert 16 << 20 < generated.bytes_per_token < 20 << 20
    assert rows[0].peak_resident_bytes > 20 << 20


@pytest.mark.llama_cpp
def test_versus_measures_both_engines_on_the_same_workload() -> None:
    pytest.importorskip("llama_cpp")
    settings = BenchSettings(WORKLOADS, [1], rounds=2, piece=2)
    rows = list(measure_versus(BenchedModel.find("tiny"), settings))
    assert [row.workload.depth for row in rows] == [4, 0, 0]
    assert [len(row.ours.seconds) for row in rows] == [2, 4, 2]
    assert [len(row.theirs.seconds) for row in rows] == [2, 4, 2]
    assert all(row.best_ratio > 0 and row.median_ratio > 0 for row in rows)


def test_without_llama_cpp_the_error_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    with pytest.raises(EdgeInferError, match=r"--vs llama\.cpp needs llama-cpp-python: pip install"):
        list(measure_versus(BenchedModel.find("tiny"), BenchSettings(WORKLOADS, [1], rounds=1)))


def test_bytes_of_a_token_grow_with_the_depth() -> None:
    with edgeinfer.load("tiny", context=64, draft=None) as model:
        shallow, deep = bytes_per_token(model.engine, 0), bytes_per_token(model.engine, 64)
        assert shallow == model.engine.bytes_per_token
        # Ten layers, keys and values, two heads of 64 float16 each.
        assert deep - shallow == 64 * 10 * 2 * 2 * 64 * 2


def test_the_time_of_a_token_has_two_parts() -> None:
    with edgeinfer.load("tiny", context=64, draft=None) as model:
        backend: Any = model.engine.backend  # type: ignore[attr-defined]
        pool = backend.pool
        result = token_time(model.engine, tokens=3)
        assert backend.pool is pool
    assert 0 < result.kernels < result.total
    assert 0 < result.rest < result.total
    assert result.calls >= 1


@pytest.mark.slow
def test_startup_time_is_split_into_phases() -> None:
    phases = StartupPhases.measure("tiny")
    parts = phases.interpreter + phases.imports + phases.kernels + phases.weights + phases.first_token
    assert parts == pytest.approx(phases.total, abs=0.05)
    assert phases.peak_resident_bytes > 20 << 20
    assert phases.planned_bytes > 20 << 20


@pytest.mark.slow
def test_a_program_that_fails_is_an_error_not_a_time(tmp_path: Path) -> None:
    with pytest.raises(EdgeInferError, match="failed"):
        commands(str(tmp_path / "none.gguf"))["edgeinfer run MODEL Once --max-tokens 1"]()


def test_reading_a_file_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10_000))
    assert reading(file) > 0


def options(*arguments: str) -> argparse.Namespace:
    return suites.parser("a program").parse_args(arguments)


def test_a_suite_accepts_lists_as_options() -> None:
    result = suites.suite("Title", options("--shapes", "a, b", "--types", "Q4_0", "--threads", "1,3"))
    assert (result.shapes, result.types, result.threads, result.smoke) == (
        ("a", "b"),
        ("Q4_0",),
        (1, 3),
        False,
    )
    assert result.settings(WORKLOADS).repetitions == suites.REPETITIONS


def test_an_invalid_number_of_threads_is_refused() -> None:
    with pytest.raises(
        SettingError, match="--threads: saw 'two', wanted whole numbers of at least 1, as 1,2"
    ):
        suites.suite("Title", options("--threads", "1,two"))


def test_a_smoke_run_uses_the_built_in_model_and_writes_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "smoke.md"
    result = suites.suite("Title", options("--smoke", "--alone", "--out", str(out)))
    result.publish([("Speed", result.speeds([Workload("prompt", 4)]))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# Title"
    assert lines[2].startswith("- machine: ")
    assert any(line.startswith("| tiny ") and "| pp4 " in line for line in lines)
    assert out.read_text().splitlines() == lines


def test_an_invalid_argument_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        raise EdgeInferError("no such thing")

    arguments: Sequence[str] = ["benchmarks/cpu_decode.py"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match=r"^cpu_decode\.py: no such thing$"):
        suites.main(body)
