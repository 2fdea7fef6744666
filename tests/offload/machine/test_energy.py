"""Energy from RAPL's and NVML's counters."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from edgeinfer_offload.machine import energy
from edgeinfer_offload.machine.energy import NO_METER, energy_meter


def domain(powercap: Path, folder: str, name: str, microjoules: str, limit: str = "1000000000") -> Path:
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{limit}\n")
    return path / "energy_uj"


def test_packages_and_memory_are_added_and_restarts_of_a_counter_are_noticed(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", "990000000")
    second = domain(tmp_path, "intel-rapl:1", "package-1", "5000000")
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", "1000000")
    domain(tmp_path, "intel-rapl:0:0", "core", "77000000")
    meter = energy_meter(powercap=tmp_path)
    assert meter.joules() == pytest.approx(996.0)
    used = meter.since_now()
    first.write_text("10000000\n")
    second.write_text("8000000\n")
    memory.write_text("1500000\n")
    assert used() == pytest.approx(20.0 + 3.0 + 0.5)


def test_without_readable_counters_there_is_no_value(tmp_path: Path) -> None:
    assert energy_meter(powercap=tmp_path / "none") == NO_METER
    domain(tmp_path, "intel-rapl:0", "package-0", "no number")
    domain(tmp_path, "intel-rapl:0:0", "core", "5")
    assert energy_meter(powercap=tmp_path) == NO_METER
    assert NO_METER.joules() is None
    assert NO_METER.since_now()() is None


def test_a_counter_that_disappears_gives_no_value(tmp_path: Path) -> None:
    path = domain(tmp_path, "intel-rapl:0", "package-0", "5")
    meter = energy_meter(powercap=tmp_path)
    used = meter.since_now()
    path.unlink()
    assert meter.joules() is None
    assert used() is None


class FakeNvml:
    """A driver with one GPU, which has used 1,500 millijoules more at each reading."""

    def __init__(self, supported: bool = True) -> None:
        self.millijoules, self.supported = 0, supported

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:  # noqa: N802
        return 0 if index.value == 0 else 2

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, out: Any) -> int:  # noqa: N802
        self.millijoules += 1500
        out.contents.value = self.millijoules
        return 0 if self.supported else 3


def test_a_gpu_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", "2000000")
    monkeypatch.setattr(energy, "load_nvml", FakeNvml)
    meter = energy_meter(0, tmp_path)
    assert meter.since_now()() == pytest.approx(1.5)
    for missing in (energy_meter(1, tmp_path), energy_meter(None, tmp_path)):
        assert missing.joules() == pytest.approx(2.0)


def test_a_gpu_without_the_counter_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "load_nvml", lambda: FakeNvml(supported=False))
    assert energy_meter(0, tmp_path / "none") == NO_METER
