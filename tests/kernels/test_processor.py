"""What the operating system tells about the processor, read from files and structures of other machines."""

import os
import platform
import struct
import sysconfig
from pathlib import Path

import pytest

from edgeinfer_kernels.system import processor
from edgeinfer_kernels.system.processor import (
    AT_HWCAP,
    AT_HWCAP2,
    architecture,
    arm_features,
    cpus_of_list,
    fast_cpus,
    fast_cpus_of,
    last_level_cache_bytes,
    linux_speeds,
    usable_cpus,
)
from edgeinfer_kernels.system.windows import ProcessorInformation, read_processor_information

FP, ASIMD, CRC32, ATOMICS, CPUID, ASIMDDP, SVE = 1 << 0, 1 << 1, 1 << 7, 1 << 8, 1 << 11, 1 << 20, 1 << 22
SVE2, I8MM = 1 << 1, 1 << 13
RASPBERRY_PI_4 = FP | ASIMD | CRC32 | CPUID, 0
RASPBERRY_PI_5 = RASPBERRY_PI_4[0] | ATOMICS | ASIMDDP, 0
GRAVITON_3 = RASPBERRY_PI_5[0] | SVE, SVE2 | I8MM
"""The words HWCAP and HWCAP2."""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (RASPBERRY_PI_4, {"neon"}),
        (RASPBERRY_PI_5, {"neon", "lse", "dotprod"}),
        (GRAVITON_3, {"neon", "lse", "dotprod", "i8mm"}),
    ],
)
def test_features_of_an_arm_linux_are_bits_of_the_auxiliary_vector(
    words: tuple[int, int], wanted: set[str]
) -> None:
    values = dict(zip((AT_HWCAP, AT_HWCAP2), words, strict=True))
    assert arm_features("linux", auxiliary=values.__getitem__) == wanted


def test_features_of_an_apple_processor_are_values_of_sysctl() -> None:
    known = {"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_LSE": 1, "hw.optional.arm.FEAT_I8MM": 0}
    assert arm_features("darwin", sysctl=known.get) == {"neon", "dotprod", "lse"}
    assert arm_features("darwin", sysctl=dict[str, int]().get) == {"neon"}


def test_features_of_windows_on_arm_are_numbers_of_features() -> None:
    assert arm_features("win32", has_number={34, 43}.__contains__) == {"neon", "lse", "dotprod"}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("AMD64", "x86_64"), ("ARM64", "aarch64"), ("arm64", "aarch64"), ("riscv64", "riscv64")],
)
def test_an_architecture_has_one_name(monkeypatch: pytest.MonkeyPatch, name: str, wanted: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: f"win-{name}")
    assert architecture() == wanted


def write_capacities(folder: Path, capacities: list[int]) -> None:
    for cpu, capacity in enumerate(capacities):
        (folder / f"cpu{cpu}").mkdir()
        (folder / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacity}\n")


def test_cores_of_little_capacity_are_slow(tmp_path: Path) -> None:
    write_capacities(tmp_path, [380, 380, 380, 380, 870, 870, 870, 1024])
    speeds = linux_speeds(frozenset(range(8)), tmp_path)
    assert fast_cpus_of(speeds) == 4
    assert fast_cpus_of(linux_speeds(frozenset({0, 1}), tmp_path)) == 2


def test_intel_lists_its_slow_cores(tmp_path: Path) -> None:
    lists = tmp_path / "core", tmp_path / "atom"
    lists[0].write_text("0-3\n")
    lists[1].write_text("4-6,8\n")
    speeds = linux_speeds(frozenset(range(7)), tmp_path, lists)
    assert fast_cpus_of(speeds) == 4
    assert len(speeds) == 7


def test_without_kinds_of_cores_all_are_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linux_speeds(frozenset({0, 1}), tmp_path, (tmp_path / "core", tmp_path / "atom")) == {}
    monkeypatch.setattr(processor, "relative_speeds", dict[int, float])
    assert fast_cpus() == usable_cpus()


def test_a_quota_limits_the_fast_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "relative_speeds", lambda: {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.4})
    monkeypatch.setattr(processor, "usable_cpus", lambda: 2)
    assert fast_cpus() == 2


def test_lists_of_cpus_have_numbers_and_ranges() -> None:
    assert cpus_of_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    with pytest.raises(ValueError, match="invalid literal"):
        cpus_of_list("0-x")


def core(efficiency: int, mask: int) -> bytes:
    body = struct.pack("<BB20xHQH6x", 1, efficiency, 1, mask, 0)
    return struct.pack("<II", 0, 8 + len(body)) + body


def data_cache(level: int, nbytes: int, kind: int = 0) -> bytes:
    body = struct.pack("<BBHII18xHQH6x", level, 8, 64, nbytes, kind, 1, 0xF, 0)
    return struct.pack("<II", 2, 8 + len(body)) + body


def test_cores_and_caches_of_windows_are_read_from_its_structures() -> None:
    data = core(1, 0b11) + core(0, 0b100) + data_cache(1, 32768, kind=1) + data_cache(3, 12 << 20)
    wanted = ProcessorInformation(((1, 2), (0, 1)), ((3, 12 << 20),))
    assert read_processor_information(data) == wanted
    assert read_processor_information(data[:-1]).cores == wanted.cores
    assert read_processor_information(b"") == ProcessorInformation()


def test_usable_processors_are_counted_by_affinity() -> None:
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_caches_of_this_machine_are_of_a_plausible_size() -> None:
    assert 0 <= last_level_cache_bytes() < 1 << 34
