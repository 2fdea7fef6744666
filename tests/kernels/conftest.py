"""Kernels of every instruction set that this processor has, built once into the user's own cache."""

from collections.abc import Callable
from functools import cache

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.features import choose, detect
from edgeinfer_kernels.cpu.layout import FIELDS
from edgeinfer_kernels.cpu.objects import Kernels, load_kernels

ISA_NAMES = [isa.name for isa in detect().available]


@cache
def _kernels(isa: str) -> Kernels:
    return load_kernels(user_folder("cache"), choose(isa), FIELDS)


@pytest.fixture(scope="session")
def kernels_for() -> Callable[[str], Kernels]:
    """Instruction set -> all its kernels."""
    return _kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """All kernels of the best instruction set."""
    return _kernels(ISA_NAMES[0])
