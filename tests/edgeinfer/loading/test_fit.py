"""Speeds of a fit: from the kernels' measurements, else marked as assumed."""

from pathlib import Path

import pytest

from edgeinfer.planning import fit as fitting
from edgeinfer.planning.absent_model import shape_model
from edgeinfer.planning.fit import (
    ASSUMED_BYTES_PER_SECOND,
    USUAL_FORMATS,
    fit,
    known_machine,
    measure_usual_formats,
    with_known_speeds,
)
from edgeinfer.planning.model_plan import described_machine, sizes_of
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.measure import stored_figures
from edgeinfer_offload.machine.this_machine import are_kernels_built

READING = 80e9


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of a machine with two processors and no GPU."""
    monkeypatch.setattr(fitting, "user_folder", lambda kind: tmp_path)
    monkeypatch.setattr(fitting, "usable_cpus", lambda: 2)
    monkeypatch.setattr(fitting, "stored_threads", lambda folder: 2)
    monkeypatch.setattr(fitting, "usable_gpu", lambda device: None)
    return tmp_path


def sizes_in(quant: str) -> ModelSizes:
    return sizes_of(shape_model("llama-3-8b", quant).file)


def keep(cache: Path, rates: dict[str, float]) -> None:
    """Store the rates of formats."""
    figures = {"2 threads": READING, "2 threads block": 4e-6, "2 threads token": 0.0}
    for name, rate in rates.items():
        figures |= {f"2 threads {name}": rate, f"2 threads {name} prompt": 4e11}
    stored_figures(cache).keep(figures)


def test_an_unmeasured_machine_has_an_assumed_bandwidth(cache: Path) -> None:
    machine = known_machine()
    assert (machine.origin, machine.processor.bytes_per_second) == ("unmeasured", ASSUMED_BYTES_PER_SECOND)
    assert fit(sizes_in("Q4_K_M"), machine).is_assumed


def test_measured_kernels_give_the_speed_and_the_bandwidth_alone_is_assumed(cache: Path) -> None:
    keep(cache, {})
    sizes = sizes_in("Q4_K_M")
    by_bandwidth = fit(sizes, with_known_speeds(known_machine(), sizes))
    keep(cache, {"Q4_K": 30e9, "Q6_K": 30e9})
    measured = fit(sizes, with_known_speeds(known_machine(), sizes))
    assert (by_bandwidth.is_assumed, measured.is_assumed) == (True, False)
    assert by_bandwidth.tokens_per_second
    assert measured.tokens_per_second
    assert 0.3 < measured.tokens_per_second / by_bandwidth.tokens_per_second < 0.6


def test_unmeasured_formats_count_as_the_slowest_usual_one(cache: Path) -> None:
    keep(cache, {"Q4_K": 40e9, "Q6_K": 30e9})
    sizes = sizes_in("Q8_0")
    machine = with_known_speeds(known_machine(), sizes)
    assert machine.processor.rate("Q8_0") == 30e9
    assert fit(sizes, machine).is_assumed


def test_a_described_machine_is_not_assumed() -> None:
    machine = described_machine("cpu: 32GiB ram, 80GB/s ram")
    sizes = sizes_in("Q4_K_M")
    assert with_known_speeds(machine, sizes) is machine
    assert not fit(sizes, machine).is_assumed


def test_only_compiled_kernels_are_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, ...]] = []
    monkeypatch.setattr(fitting, "measured_threads", lambda folder: 2)
    monkeypatch.setattr(
        fitting, "with_cpu_speeds", lambda machine, folder, formats: measured.append(tuple(formats))
    )
    assert not are_kernels_built(cache, USUAL_FORMATS)
    measure_usual_formats()
    assert measured == []
    monkeypatch.setattr(fitting, "are_kernels_built", lambda folder, formats: True)
    measure_usual_formats()
    assert measured == [USUAL_FORMATS]
