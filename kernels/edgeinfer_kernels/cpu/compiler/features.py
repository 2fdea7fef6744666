"""The features of this CPU, and the instruction sets that they support."""

from dataclasses import dataclass

import llvmlite.binding as llvm

from edgeinfer_kernels.system.processor import architecture, arm_features, tiles_granted


@dataclass(frozen=True)
class InstructionSet:
    """A target of the kernel build: an LLVM CPU name and the required features."""

    name: str
    architecture: str
    processor: str
    """Whose instruction costs the compiler assumes."""
    features: tuple[str, ...]
    """Required of the processor, and used."""
    summary: str
    tiles: bool = False
    """Whether it has AMX GEMM kernels. AMX needs permission for the process, see `tiles_granted`."""

    unused: tuple[str, ...] = ()
    """Features of `processor` that others with the required ones may lack."""

    @property
    def feature_string(self) -> str:
        """The format of LLVM and numba: `+avx2,+fma`; `-` turns off a feature of `processor`."""
        signs = ("+", self.features), ("-", self.unused)
        return ",".join(f"{sign}{feature}" for sign, features in signs for feature in features)


_X86, _ARM = "x86_64", "aarch64"
_AVX2 = ("sse2", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
_AMX = (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16")

_DOTPROD = ("neon", "lse", "dotprod")
_A72 = ("crc", "aes", "sha2", "perfmon")
_N1 = (*_A72, "fullfp16", "rcpc", "spe", "ssbs", "ras")

INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("amx", _X86, "cascadelake", _AMX, "as avx512-vnni, and tiles of bfloat16", tiles=True),
    InstructionSet("avx512-vnni", _X86, "cascadelake", _AVX512, "512-bit registers, vpdpbusd"),
    InstructionSet("avx-vnni", _X86, "haswell", (*_AVX2, "avxvnni"), "256-bit registers, vpdpbusd"),
    InstructionSet("avx2", _X86, "haswell", _AVX2, "256-bit registers, vpmaddubsw"),
    InstructionSet("neon-i8mm", _ARM, "neoverse-n1", (*_DOTPROD, "i8mm"), "sdot, smmla", unused=_N1),
    InstructionSet("neon-dotprod", _ARM, "neoverse-n1", _DOTPROD, "128-bit registers, sdot", unused=_N1),
    InstructionSet("portable-arm", _ARM, "cortex-a72", ("neon",), "128-bit registers", unused=_A72),
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


def processor_flags() -> frozenset[str]:
    """LLVM names of the features that this CPU and its operating system have enabled."""
    try:
        found = {name for name, on in llvm.get_host_cpu_features().items() if on}
    except RuntimeError:  # no LLVM support on this platform: only the portable kernels are safe
        found = {"sse2"}
    return frozenset(found | arm_features() if architecture() == _ARM else found)


def detect() -> CpuFeatures:
    """Detect the features of the CPU; an unknown architecture raises `UnsupportedProcessorError`."""
    machine, flags = architecture(), processor_flags()
    available = tuple(
        isa
        for isa in INSTRUCTION_SETS
        if machine == isa.architecture
        and flags.issuperset(isa.features)
        and (not isa.tiles or tiles_granted())
    )
    if not available:
        known = sorted({isa.architecture for isa in INSTRUCTION_SETS})
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
