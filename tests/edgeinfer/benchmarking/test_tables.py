"""Tables and records of results."""

import json
from pathlib import Path

import pytest

from edgeinfer.benchmarking import tables
from edgeinfer.benchmarking.machine import Machine, this_machine
from edgeinfer.benchmarking.speed_runs import BenchedModel, SpeedRow, VersusRow
from edgeinfer.benchmarking.timings import Timings
from edgeinfer.benchmarking.workloads import Workload

MODEL = BenchedModel("small", Path("/models/small.gguf"), 3 << 20, 1_500_000)
PROMPT = SpeedRow(Workload("prompt", 512), 2, Timings((0.5, 0.5), 512), 1e6, 2e9, 64 << 20)
GENERATE = SpeedRow(Workload("generate", 128, 64), 2, Timings((1.0, 2.0), 128), 1e7, 2e9, 64 << 20)
VERSUS = VersusRow(
    Workload("generate", 128), 1, Timings((0.1,) * 20), Timings((0.15,) * 10 + (0.2,) * 10), 1e8, 2e9
)


def test_a_table_is_aligned_markdown() -> None:
    assert tables.markdown(["name", "value"], [["a", "1"], ["longer", "22.5"]]) == (
        "| name   | value |\n|--------|------:|\n| a      |     1 |\n| longer |  22.5 |"
    )


def test_a_speed_table_has_a_row_for_each_workload() -> None:
    lines = tables.speed_table(MODEL, [PROMPT, GENERATE]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(tables.SPEED_HEAD)
    prompt = ["small", "3.0 MiB", "1.5 M", "2", "pp512", "1024 ± 0.00", "-", "-", "500 ms", "64 MiB"]
    assert cells[2] == prompt
    assert cells[3][4:] == ["tg128 @ d64", "96.0 ± 45.3", "0.96", "48%", "-", "64 MiB"]
    assert len({len(line) for line in lines}) == 1


def test_a_versus_table_has_both_engines_and_both_ratios() -> None:
    line = tables.versus_table([(MODEL, VERSUS)]).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["small", "1", "tg128"]
    assert cells[3:9] == ["10.0", "6.67", "1.50x", "10.0", "5.71", "1.75x"]
    assert cells[9:] == ["1.00", "50%"]


def test_records_hold_every_number_in_plain_units() -> None:
    record = tables.speed_record(GENERATE)
    assert record["test"] == "tg128 @ d64"
    assert record["tokens_per_second"] == 96
    assert record["gigabytes_per_second"] == pytest.approx(0.96)
    assert record["seconds_to_first_token"] is None
    assert tables.speed_record(PROMPT)["seconds_to_first_token"] == 0.5
    versus = tables.versus_record(VERSUS)
    assert versus["best_decile_ratio"] == pytest.approx(1.5)
    assert versus["llama.cpp"]["median"] == pytest.approx(1 / 0.175)


def test_a_report_goes_into_json() -> None:
    report = tables.report_record(MODEL, this_machine(["edgeinfer", "bench"]), [tables.versus_record(VERSUS)])
    read = json.loads(json.dumps(report, allow_nan=False))
    assert read["machine"]["command"] == "edgeinfer bench"
    assert read["results"][0]["edgeinfer"]["tokens_a_piece"] == 1


def test_csv_flattens_records() -> None:
    head, row = tables.csv_table(MODEL, [tables.versus_record(VERSUS)]).splitlines()
    cells = dict(zip(head.split(","), row.split(","), strict=True))
    assert cells["model"] == "small"
    assert cells["edgeinfer.tokens_a_piece"] == "1"
    assert "edgeinfer.seconds" not in cells


@pytest.mark.parametrize(
    ("seconds", "shown"), [(2.5, "2500 ms"), (0.0123, "12.3 ms"), (0.00123, "1.23 ms"), (2e-5, "0.020 ms")]
)
def test_milliseconds_have_three_digits(seconds: float, shown: str) -> None:
    assert tables.shown_milliseconds(seconds) == shown


def test_the_machine_is_described_in_four_lines() -> None:
    machine = Machine(
        "chip", 2, 8 << 30, "Linux 6", "avx2", {"python": "3.11"}, 1.25, "2026-01-01", "edgeinfer bench"
    )
    assert machine.lines() == [
        "machine: chip, 2 cores, 8 GiB, Linux 6, load average 1.2 before the run",
        "versions: python 3.11; kernels: avx2",
        "date: 2026-01-01",
        "command: edgeinfer bench",
    ]


def test_the_energy_of_a_token_is_reported_if_it_was_measured() -> None:
    measured = SpeedRow(Workload("generate", 4), 2, Timings((0.5, 0.5), 4, 12.0), 1e6, 2e9, 64 << 20)
    assert tables.speed_record(measured)["joules_per_token"] == 1.5
    assert tables.speed_record(PROMPT)["joules_per_token"] is None
    assert tables.energy_lines([PROMPT, VERSUS]) == []
    (line,) = tables.energy_lines([PROMPT, measured])
    assert line == "joules per token, of the whole processors and the GPU: tg4 1.5"
