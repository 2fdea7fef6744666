"""Energy that processors and a GPU have used: RAPL (Linux) and NVML, where their counters can be read."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = ("libnvidia-ml.so.1", "nvml.dll")
COUNTED = ("package", "dram")
"""Names of RAPL's domains that are added; others are parts of a package, or overlap."""

Counter = Callable[[], float]
"""Returns joules since an arbitrary point in time."""


@dataclass(frozen=True)
class EnergyMeter:
    """Counters of several devices; without any, nothing can be read."""

    counters: Sequence[Counter] = ()

    def joules(self) -> float | None:
        """Joules of all devices since an arbitrary point in time; None if one can't be read any more, or if
        there are no counters.
        """
        try:
            return sum(counter() for counter in self.counters) if self.counters else None
        except (OSError, ValueError):
            return None

    def since_now(self) -> Callable[[], float | None]:
        """A function that returns the joules used since this call; None if they can't be read."""
        before = self.joules()

        def used() -> float | None:
            after = self.joules()
            return None if before is None or after is None else after - before

        return used


NO_METER = EnergyMeter()


def energy_meter(gpu: int | None = None, powercap: Path = POWERCAP) -> EnergyMeter:
    """A meter of the processors, and of the GPU of this index, as far as their counters can be read.

    RAPL's counters belong to root on most systems.
    """
    counters: list[Counter] = [_RaplCounter(folder) for folder in _readable_domains(powercap)]
    if gpu is not None and (counter := _gpu_counter(gpu)) is not None:
        counters.append(counter)
    return EnergyMeter(tuple(counters))


def _readable_domains(powercap: Path) -> list[Path]:
    """The folders of the domains that are counted. Source: Linux, Documentation/power/powercap."""
    folders = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            _microjoules(folder / "energy_uj")
        except (OSError, ValueError):
            continue
        if name.startswith(COUNTED):
            folders.append(folder)
    return folders


def _microjoules(path: Path) -> int:
    return int(path.read_text())


class _RaplCounter:
    """The energy of one domain. Its counter restarts at 0 after some minutes to hours; a restart between two
    readings is added, more than one isn't noticed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        self._range = _microjoules(folder / "max_energy_range_uj")
        self._last = _microjoules(self._path)
        self._restarts = 0

    def __call__(self) -> float:
        now = _microjoules(self._path)
        self._restarts += now < self._last
        self._last = now
        return (self._restarts * self._range + now) / 1e6


def _gpu_counter(index: int) -> Counter | None:
    """The energy of a GPU; None without a driver, or for a GPU before Volta. Source: NVML's nvml.h."""
    library = load_nvml()
    handle = ctypes.c_void_p()
    if library is None or library.nvmlInit_v2() != 0:
        return None
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    counter = partial(_gpu_joules, library, handle)
    try:
        counter()
    except OSError:
        return None
    return counter


def _gpu_joules(library: ctypes.CDLL, handle: ctypes.c_void_p) -> float:
    millijoules = ctypes.c_ulonglong()
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.pointer(millijoules)) != 0:
        raise OSError("the GPU's energy can't be read")
    return millijoules.value / 1e3


def load_nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library; None without a driver."""
    for name in NVML:
        try:
            return ctypes.CDLL(name)
        except OSError:  # No driver under that name.
            continue
    return None
