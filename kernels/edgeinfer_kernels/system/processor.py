"""The processor as the system describes it: architecture, ARM features, usable and fast CPUs, caches."""

import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from edgeinfer_kernels.system.macos import sysctl_number
from edgeinfer_kernels.system.windows import (
    ProcessorInformation,
    affinity_of_process,
    has_processor_feature,
    processor_information,
)

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
INTEL_CORE_TYPES = Path("/sys/devices/cpu_core/cpus"), Path("/sys/devices/cpu_atom/cpus")
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Other names of an architecture, in lower case -> its name here."""
MIN_FAST_CAPACITY = 2 / 3
"""CPUs with less of the largest capacity are slow: the cores at a barrier wait for the slowest one."""

AT_HWCAP, AT_HWCAP2 = 16, 26
ARM_ON_LINUX = {"lse": (AT_HWCAP, 8), "dotprod": (AT_HWCAP, 20), "i8mm": (AT_HWCAP2, 13)}
"""LLVM's name -> the word of the auxiliary vector and its bit. Source: Linux, arm64/elf_hwcaps.rst."""
ARM_ON_MACOS = {"lse": "FEAT_LSE", "dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM"}
ARM_ON_WINDOWS = {"lse": 34, "dotprod": 43, "i8mm": 66}
"""Numbers for IsProcessorFeaturePresent. Source: winnt.h."""
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


def architecture() -> str:
    """The architecture of this process: "x86_64", "aarch64", or another name of the system in lower case."""
    name = platform.machine()
    if sys.platform == "win32":  # an emulated process runs on another machine's architecture
        name = sysconfig.get_platform().removeprefix("win-")
    name = name.lower()
    return ARCHITECTURES.get(name, name)


def arm_features(
    system: str = sys.platform,
    auxiliary: Callable[[int], int] | None = None,
    has_number: Callable[[int], bool] = has_processor_feature,
    sysctl: Callable[[str], int | None] = sysctl_number,
) -> set[str]:
    """LLVM's names of the features of a 64-bit ARM that kernels use: LLVM detects dot products on no system,
    and nothing on macOS. Every such processor has `neon`.
    """
    if system == "win32":
        found = {name for name, number in ARM_ON_WINDOWS.items() if has_number(number)}
    elif system == "darwin":
        found = {name for name, key in ARM_ON_MACOS.items() if sysctl(f"hw.optional.arm.{key}") == 1}
    else:
        word_of = auxiliary or _auxiliary_word
        words = {word: word_of(word) for word in (AT_HWCAP, AT_HWCAP2)}
        found = {name for name, (word, bit) in ARM_ON_LINUX.items() if words[word] >> bit & 1}
    return {"neon", *found}


def _auxiliary_word(key: int) -> int:
    read = getattr(ctypes.CDLL(None), "getauxval", None)
    if read is None:  # not a Linux
        return 0
    read.restype, read.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return int(read(key))


@cache
def tiles_granted() -> bool:
    """Request permission for AMX tiles: Linux grants it per process, for all its threads.

    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    if sys.platform != "linux" or architecture() != "x86_64":
        return False
    ask: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return ask == 0


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this process may use: its affinity, if the system has one, else all."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    mask = affinity_of_process()
    if mask and count <= 64:  # more processors are in several groups, of which a mask describes one
        return frozenset(cpu for cpu in range(64) if mask >> cpu & 1)
    return frozenset(range(count))


def usable_cpus() -> int:
    """Number of CPUs that this process may use: its affinity, and the container's quota if there is one."""
    count = len(allowed_cpus())
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # No cgroup v2, or no read permission: use the affinity only.
        pass
    return count


def fast_cpus() -> int:
    """Number of usable CPUs of the fastest kinds: all of them, unless the processor has slower cores too."""
    usable = usable_cpus()
    fast = fast_cpus_of(relative_speeds())
    return min(usable, fast) if fast else usable


def fast_cpus_of(speeds: Mapping[int, float]) -> int:
    """How many of the CPUs have at least MIN_FAST_CAPACITY of the largest speed."""
    return sum(speed >= MIN_FAST_CAPACITY * max(speeds.values()) for speed in speeds.values())


def relative_speeds() -> dict[int, float]:
    """Speed of each allowed CPU, in any unit; empty if the system describes no different kinds."""
    if sys.platform == "win32":
        return _of_windows_cores(processor_information())
    if sys.platform == "darwin":
        fast, slow = (sysctl_number(f"hw.perflevel{level}.logicalcpu") or 0 for level in (0, 1))
        return dict(enumerate([1.0] * fast + [0.5] * slow)) if slow else {}
    return linux_speeds(allowed_cpus())


def _of_windows_cores(information: ProcessorInformation) -> dict[int, float]:
    kinds = {kind for kind, _ in information.cores}
    speeds = [0.5 + 0.5 * (kind == max(kinds)) for kind, count in information.cores for _ in range(count)]
    return dict(enumerate(speeds)) if len(kinds) > 1 else {}


def linux_speeds(
    cpus: frozenset[int], folder: Path = CPUS, core_types: tuple[Path, Path] = INTEL_CORE_TYPES
) -> dict[int, float]:
    """As `relative_speeds` on Linux: ARM's capacities, or Intel's lists of the two core types."""
    try:
        return {cpu: float((folder / f"cpu{cpu}" / "cpu_capacity").read_text("ascii")) for cpu in cpus}
    except (OSError, ValueError):
        pass
    try:
        fast, slow = (cpus_of_list(path.read_text("ascii")) & cpus for path in core_types)
    except (OSError, ValueError):
        return {}
    return {**dict.fromkeys(fast, 1.0), **dict.fromkeys(slow, 0.5)}


def cpus_of_list(text: str) -> set[int]:
    """The CPUs of a list such as `0-3,8`. Raises `ValueError`."""
    cpus: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def last_level_cache_bytes(folder: Path = CPUS) -> int:
    """Bytes of the last-level caches of all sockets that this process may use; 0: unknown."""
    if sys.platform == "win32":
        levels = processor_information().caches
        return sum(nbytes for level, nbytes in levels if level == max(level for level, _ in levels))
    if sys.platform == "darwin":  # the clusters of cores have one each
        return sum(sysctl_number(f"hw.perflevel{level}.l2cachesize") or 0 for level in (0, 1))
    return linux_cache_bytes(folder)


def linux_cache_bytes(folder: Path) -> int:
    """As `last_level_cache_bytes` on Linux."""
    caches: dict[int, dict[str, int]] = {}
    for cpu in allowed_cpus():
        for entry in (folder / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level, size, shared = (
                    (entry / name).read_text(encoding="ascii").strip()
                    for name in ("level", "size", "shared_cpu_list")
                )
                nbytes = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
            except (OSError, ValueError, KeyError):
                continue
            caches.setdefault(int(level), {})[shared] = nbytes
    return sum(caches[max(caches)].values()) if caches else 0
