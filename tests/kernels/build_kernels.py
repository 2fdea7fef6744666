"""Compiles units of kernels for instruction sets: `python -m tests.kernels.build_kernels FOLDER UNIT=SET…`.

numba's part of the work, most of it, is done once for all sets of a unit (`rows_F32=avx2,portable`).
A program that uses kernels needs one set only.
"""

import gc
import sys
import tempfile
from pathlib import Path

from edgeinfer_kernels.cpu.compiler import build_object
from edgeinfer_kernels.cpu.compiler.kernel_cache import KernelCache
from edgeinfer_kernels.cpu.compiler.kernel_folders import BUILDING
from edgeinfer_kernels.cpu.compiler.units import Target
from tests.kernels.conftest import instruction_set


def build(root: Path, unit: str, name: str) -> None:
    """The unit's object file for an instruction set, in the cache at `root`."""
    isa = instruction_set(name)
    with tempfile.TemporaryDirectory(dir=root, prefix=BUILDING) as scratch:
        made = Path(scratch, unit)
        made.write_bytes(build_object.build(unit, Target(isa.processor, isa.feature_string, isa.tiles)))
        KernelCache(root, isa).keep(unit, made)


def main() -> None:
    gc.set_threshold(build_object.OBJECTS_BEFORE_COLLECTION)
    build_object.stop_before_linking()
    folder, *wanted = sys.argv[1:]
    for unit, _, names in (each.partition("=") for each in wanted):
        for name in names.split(","):
            build(Path(folder), unit, name)


if __name__ == "__main__":
    main()
