"""Kernels of every instruction set that this processor has, built once into the user's own cache."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.blocks import BLOCK_KINDS
from edgeinfer_kernels.cpu.blocks import units_of
from edgeinfer_kernels.cpu.compiler.features import InstructionSet, choose, detect
from edgeinfer_kernels.cpu.compiler.kernel_cache import BLOCKS, KernelCache, Kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, row_units, sparse_units
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.cpu.layout.neuron_layout import NEURON_FORMATS
from tests.kernels.row_matrices import FLOATS

ISA_NAMES = [isa.name for isa in detect().available]
ISAS = [pytest.param(name, marks=pytest.mark.slow) if name in ISA_NAMES[1:-1] else name for name in ISA_NAMES]
"""The instruction sets as parameters of tests: the best and the portable one by default."""
EMULATED_TILES = replace(detect().available[-1], name="amx-emulated", tiles=True)
"""Kernels by tiles on processors that have none; here only."""
QUANTIZED_ROWS = row_units(name for name in FIELDS if name not in FLOATS)
TILE_ISAS = [*(isa.name for isa in detect().available if isa.tiles), EMULATED_TILES.name]


def instruction_set(name: str) -> InstructionSet:
    return EMULATED_TILES if name == EMULATED_TILES.name else choose(name)


class _WithoutTiles(Kernels):
    """Objects that hold kernels by tiles too, for a processor that has none."""

    def find(self, name: str) -> int:
        return 0 if name.startswith("tile_") else super().find(name)


@cache
def objects() -> dict[str, dict[str, bytes]]:
    """Instruction set -> unit -> object file, of all that a test may want.

    They are built together: most of a compiler's work is the same for all instruction sets, and each process
    of it that is started anew does again what units share.
    """
    root, (*others, last) = user_folder("cache"), map(choose, ISA_NAMES)
    shared = [BLOCKS, *units_of(BLOCK_KINDS), SERVICE, *row_units(FLOATS), *sparse_units(NEURON_FORMATS)]
    plain = dict(zip(shared, KernelCache(root, last, others).objects(shared), strict=True))
    # What is built for emulated tiles holds the plain rows of its instruction set too.
    with_tiles = KernelCache(root, EMULATED_TILES, others).objects(QUANTIZED_ROWS)
    found = {last.name: {**plain, **dict(zip(QUANTIZED_ROWS, with_tiles, strict=True))}}
    units = [*shared, *QUANTIZED_ROWS]
    for isa in others:
        found[isa.name] = dict(zip(units, KernelCache(root, isa).objects(units), strict=True))
    return found


def built_kernels(isa: str, units: Iterable[str]) -> Kernels:
    """The block kernels and those of `units`, of an instruction set or with emulated tiles."""
    given = instruction_set(isa)
    found = objects()[ISA_NAMES[-1] if given is EMULATED_TILES else given.name]
    wanted = [found[unit] for unit in dict.fromkeys([BLOCKS, *units])]
    return (_WithoutTiles if isa == ISA_NAMES[-1] else Kernels)(wanted)


@cache
def _row_kernels(isa: str) -> Kernels:
    return built_kernels(isa, row_units(FIELDS))


@pytest.fixture(scope="session")
def kernels_for() -> Callable[[str], Kernels]:
    """Instruction set -> its kernels for the rows of every format."""
    return _row_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """Kernels of the best instruction set: rows of every format, experts, and what serves a device."""
    return built_kernels(ISA_NAMES[0], [*units_of(BLOCK_KINDS), SERVICE, *row_units(FIELDS)])
