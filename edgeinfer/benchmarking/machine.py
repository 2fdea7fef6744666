"""The machine, the versions and the time of a measurement."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgeinfer_kernels.cpu.compiler.features import detect
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_offload.machine.host_memory import host_memory

PACKAGES = ("edgeinfer", "numpy", "numba", "llvmlite", "llama-cpp-python")


@dataclass(frozen=True)
class Machine:
    """Machine data of one run."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    kernels: str
    """The instruction set of our kernels."""
    versions: dict[str, str]
    load_average: float | None
    """Load average of the last minute before the run: activity of other programs."""
    date: str
    command: str

    def lines(self) -> list[str]:
        """The data as lines of text."""
        load = "" if self.load_average is None else f", load average {self.load_average:.1f} before the run"
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [
            f"machine: {self.processor}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB, "
            f"{self.system}{load}",
            f"versions: {versions}; kernels: {self.kernels}",
            f"date: {self.date}",
            f"command: {self.command}",
        ]


def this_machine(command: Sequence[str]) -> Machine:
    """Data of this machine now; `command`: the command line as typed."""
    features = detect()
    return Machine(
        processor=_processor(features.name),
        cores=usable_cpus(),
        memory_bytes=host_memory().total_bytes,
        system=f"{platform.system()} {platform.release()}",
        kernels=features.best.name,
        versions={"python": platform.python_version(), **_versions()},
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=shlex.join(command),
    )


def command_line() -> list[str]:
    """The command line as typed, without private folder names."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":
        return ["python", f"{program.absolute().parent.name}/{program.name}", *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def _processor(fallback: str) -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({fallback})" if names else fallback


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an optional package, or a source tree
            continue
    return versions
