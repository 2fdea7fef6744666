"""Kernels of every instruction set that this processor has, built once into the user's own cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.features import InstructionSet, choose, detect
from edgeinfer_kernels.cpu.kernel_units import EXPERTS, SERVICE, row_units
from edgeinfer_kernels.cpu.layout import FIELDS
from edgeinfer_kernels.cpu.objects import Kernels, load_kernels

ISA_NAMES = [isa.name for isa in detect().available]
EMULATED_TILES = replace(detect().available[-1], name="amx-emulated", tiles=True)
"""Kernels by tiles on processors that have none; here only."""
TILE_ISAS = [*(isa.name for isa in detect().available if isa.tiles), EMULATED_TILES.name]


def instruction_set(name: str) -> InstructionSet:
    return EMULATED_TILES if name == EMULATED_TILES.name else choose(name)


@cache
def _kernels(isa: str) -> Kernels:
    return load_kernels(user_folder("cache"), instruction_set(isa), [EXPERTS, SERVICE, *row_units(FIELDS)])


@pytest.fixture(scope="session")
def kernels_for() -> Callable[[str], Kernels]:
    """Instruction set -> all its kernels."""
    return _kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """All kernels of the best instruction set."""
    return _kernels(ISA_NAMES[0])
