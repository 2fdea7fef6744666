"""The features of this CPU, and the instruction sets that they support."""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm


@dataclass(frozen=True)
class InstructionSet:
    """A target of the kernel build: an LLVM CPU name and the required features."""

    name: str
    machines: tuple[str, ...]
    processor: str
    features: tuple[str, ...]
    summary: str
    tiles: bool = False
    """Whether it has AMX GEMM kernels. AMX needs permission for the process, see `tiles_granted`."""

    @property
    def feature_string(self) -> str:
        """The format of LLVM and numba: `+avx2,+fma`."""
        return ",".join(f"+{feature}" for feature in self.features)


ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18

_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")
_AVX2 = ("sse2", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")

_AMX = (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16")

INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("amx", _X86, "cascadelake", _AMX, "as avx512-vnni, and tiles of bfloat16", tiles=True),
    InstructionSet("avx512-vnni", _X86, "cascadelake", _AVX512, "512-bit registers, vpdpbusd"),
    InstructionSet("avx-vnni", _X86, "haswell", (*_AVX2, "avxvnni"), "256-bit registers, vpdpbusd"),
    InstructionSet("avx2", _X86, "haswell", _AVX2, "256-bit registers, vpmaddubsw"),
    InstructionSet("neon-dotprod", _ARM, "generic", ("neon", "dotprod"), "128-bit registers, sdot"),
    InstructionSet("portable-arm", _ARM, "generic", ("neon",), "128-bit registers"),
    InstructionSet("portable", _X86, "x86-64", ("sse2",), "whatever every x86-64 has"),
)
"""Fastest first."""


@dataclass(frozen=True)
class CpuFeatures:
    """The CPU of this machine."""

    name: str
    flags: frozenset[str]
    available: tuple[InstructionSet, ...]
    """The instruction sets that it supports, fastest first; never empty."""

    @property
    def best(self) -> InstructionSet:
        return self.available[0]


def usable_cpus() -> int:
    """Number of CPUs that this process may use: its affinity, and the container's quota if there is one."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # No cgroup v2, or no read permission: use the affinity only.
        pass
    return count


def processor_flags() -> frozenset[str]:
    """LLVM names of the features that this CPU and its operating system have enabled."""
    try:
        return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    except RuntimeError:  # no LLVM support on this platform: only the portable kernels are safe
        return frozenset({"sse2", "neon"})


@cache
def tiles_granted() -> bool:
    """Request permission for AMX tiles: Linux grants it per process, for all its threads.

    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    ask: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return ask == 0


def detect() -> CpuFeatures:
    """Detect the features of the CPU; an unknown architecture raises `UnsupportedProcessorError`."""
    machine, flags = platform.machine(), processor_flags()
    available = tuple(
        isa
        for isa in INSTRUCTION_SETS
        if machine in isa.machines and flags.issuperset(isa.features) and (not isa.tiles or tiles_granted())
    )
    if not available:
        known = sorted({name for isa in INSTRUCTION_SETS for name in isa.machines})
        raise UnsupportedProcessorError(f"processor {machine}: kernels exist for {', '.join(known)}")
    return CpuFeatures(llvm.get_host_cpu_name(), flags, available)


def choose(name: str | None = None) -> InstructionSet:
    """The fastest supported instruction set, or the one called `name` if it is supported."""
    features = detect()
    if name is None:
        return features.best
    for isa in features.available:
        if isa.name == name:
            return isa
    have = ", ".join(isa.name for isa in features.available)
    raise UnsupportedProcessorError(f"instruction set {name}: this processor ({features.name}) runs {have}")


class UnsupportedProcessorError(RuntimeError):
    """The CPU does not support the requested instruction set."""
