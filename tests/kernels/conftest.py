"""Kernels of every instruction set of this processor, built once into the user's cache."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.blocks import BLOCK_KINDS
from edgeinfer_kernels.cpu.blocks import units_of
from edgeinfer_kernels.cpu.compiler.features import InstructionSet, choose, detect
from edgeinfer_kernels.cpu.compiler.kernel_cache import (
    BLOCKS,
    KernelCache,
    Kernels,
    build_groups,
)
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, every_unit, row_units
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.system.locks import file_lock
from edgeinfer_kernels.system.private_folder import ensure_private
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_quant_formats import FORMATS
from tests.kernels.row_matrices import FLOATS

MAX_BUILD_SECONDS = 1800
"""A worker waits this long for another one that builds the kernels of a tier, on a busy machine."""
ISA_NAMES = [isa.name for isa in detect().available]
BEST, PORTABLE = ISA_NAMES[0], ISA_NAMES[-1]
ISAS = [pytest.param(name, marks=pytest.mark.slow) if name in ISA_NAMES[1:-1] else name for name in ISA_NAMES]
"""The instruction sets as parameters of tests: the best and the portable one by default."""
EMULATED_TILES = replace(detect().available[-1], name="amx-emulated", tiles=True)
"""AMX kernels on processors without AMX; emulated in tests only."""
TILE_ISAS = [*(isa.name for isa in detect().available if isa.tiles), EMULATED_TILES.name]
DEFAULT_FORMATS = (*FLOATS, "Q4_0", "Q8_0", "Q4_K", "Q6_K")
"""Formats whose kernels of the best instruction set are in the default tier: those of its models."""
PORTABLE_FORMATS = (*FLOATS, "Q8_0", "Q4_K")
"""The same of the portable instruction set, and of emulated tiles."""


Formats = str | tuple[str, ...]


def is_default(isa: str, formats: Formats) -> bool:
    """Whether the default tier has the kernels of the formats in an instruction set."""
    by_isa = {BEST: DEFAULT_FORMATS, PORTABLE: PORTABLE_FORMATS, EMULATED_TILES.name: PORTABLE_FORMATS}
    names = [formats] if isinstance(formats, str) else formats
    return {FORMATS[name].repacked_as or name for name in names} <= set(by_isa.get(isa, ()))


def isas_and_formats(isas: Iterable[str], formats: Sequence[Formats]) -> list[object]:
    """(instruction set, formats) as parameters of tests; slow, unless in the default tier."""
    pairs = product(isas, formats)
    return [pytest.param(*pair, marks=() if is_default(*pair) else pytest.mark.slow) for pair in pairs]


def best_formats(formats: Iterable[Formats]) -> list[object]:
    """Formats as parameters of tests of the best instruction set; slow, unless in the default tier."""
    return [pytest.param(name, marks=() if is_default(BEST, name) else pytest.mark.slow) for name in formats]


def instruction_set(name: str) -> InstructionSet:
    return EMULATED_TILES if name == EMULATED_TILES.name else choose(name)


class _WithoutTiles(Kernels):
    """Objects that also hold AMX kernels, for a processor without AMX."""

    def find(self, name: str) -> int:
        return 0 if name.startswith("tile_") else super().find(name)


def built_as(isa: str, unit: str) -> str:
    """The instruction set for which a unit is built: the portable rows have emulated tiles too."""
    is_tiled = unit.startswith("rows_") and unit not in row_units(FLOATS)
    if isa in (PORTABLE, EMULATED_TILES.name):
        return EMULATED_TILES.name if is_tiled else PORTABLE
    return isa


@cache
def objects(isa: str, units: tuple[str, ...]) -> dict[str, bytes]:
    """Unit -> its object file. What is built for emulated tiles has the rows of the portable set too."""
    result: dict[str, bytes] = {}
    for name in {built_as(isa, unit) for unit in units}:
        of_set = [unit for unit in units if built_as(isa, unit) == name]
        built = KernelCache(user_folder("cache"), instruction_set(name)).objects(of_set)
        result |= zip(of_set, built, strict=True)
    return result


def units_of_tier(*, slow: bool) -> dict[str, list[str]]:
    """Unit -> the instruction sets for which a tier has it. The slow tier has every unit of every one."""
    result: dict[str, list[str]] = {}
    for isa in ISA_NAMES if slow else (BEST, PORTABLE):
        names = [name for name in FORMATS if name in FIELDS and not (slow or is_default(isa, name))]
        excluded = {f"{kind}_{name}" for kind in ("rows", "neurons") for name in names}
        if not slow and isa == PORTABLE:
            excluded |= set(units_of(BLOCK_KINDS)) - {"encoder_attention", "experts", "latent_attention"}
        for unit in (BLOCKS, *(unit for unit in every_unit() if unit not in excluded)):
            result.setdefault(unit, []).append(built_as(isa, unit))
    return result


def build_all(*, slow: bool) -> None:
    """Build the missing kernels of a tier, each unit for all its instruction sets in one process."""
    root = user_folder("cache")
    ensure_private(root)
    with file_lock(root / "tests.lock", MAX_BUILD_SECONDS):
        missing = {
            unit: [isa for isa in isas if KernelCache(root, instruction_set(isa)).find(unit) is None]
            for unit, isas in units_of_tier(slow=slow).items()
        }
        units = [unit for unit, isas in missing.items() if isas]
        groups = build_groups(units, usable_cpus()) if units else []
        command = [sys.executable, "-m", "tests.kernels.build_kernels", str(root)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        running = [
            subprocess.Popen(
                [*command, *(f"{unit}={','.join(missing[unit])}" for unit in group)], env=environment
            )
            for group in groups
        ]
        assert [process.wait() for process in running] == [0] * len(running)


def built_kernels(isa: str, units: Iterable[str]) -> Kernels:
    """The block kernels and those of `units`, of an instruction set or with emulated tiles."""
    result = objects(isa, tuple(dict.fromkeys([BLOCKS, *units])))
    return (_WithoutTiles if isa == PORTABLE else Kernels)(result.values())


@cache
def row_kernels(isa: str, name: str) -> Kernels:
    return built_kernels(isa, row_units({FORMATS[name].repacked_as or name}))


@pytest.fixture(scope="session")
def kernels_for() -> Callable[[str, str], Kernels]:
    """(instruction set, format) -> the kernels for its rows."""
    return row_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """Kernels of the best instruction set: rows of the default formats, experts, and the CPU shard."""
    return built_kernels(BEST, [*units_of(BLOCK_KINDS), SERVICE, *row_units(DEFAULT_FORMATS)])


@pytest.fixture(scope="session")
def nvfp4_kernels() -> Kernels:
    """As `kernels`, with rows of NVFP4 and floats."""
    return built_kernels(BEST, [*units_of(BLOCK_KINDS), SERVICE, *row_units({*FLOATS, "NVFP4"})])
