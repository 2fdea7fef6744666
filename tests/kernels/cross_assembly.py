"""Compile units of kernels for a processor that this machine isn't: `python cross_assembly.py TRIPLE UNIT…`.

Prints each unit's assembly. numba makes the LLVM code as for this machine, with the features of the other
one; it must not turn it into machine code, which the intrinsics of another processor would break. Runs as a
process of its own, as the build does.
"""

import sys
from typing import Any

import llvmlite.binding as llvm
from numba import config
from numba.core.codegen import JITCodeLibrary
from numba.core.cpu import CPUContext

from edgeinfer_kernels.cpu.native.build_object import linked_module, optimise


def linked_but_not_emitted(context: Any, library: Any, description: Any, environment: Any) -> Any:
    """In place of a callable; each function needs a builtin of its own."""
    library._ensure_finalized()
    return [].append


def assembly(unit: str, triple: str) -> str:
    """The unit's assembly for numba's configured processor on another architecture."""
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=config.CPU_NAME, features=config.CPU_FEATURES, opt=3
    )
    module = linked_module(unit)
    module.triple = triple
    module.data_layout = str(machine.target_data)
    optimise(module, machine)
    return str(machine.emit_assembly(module))


def main() -> None:
    """Print the assembly of all units."""
    triple, *units = sys.argv[1:]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    JITCodeLibrary._finalize_specific = lambda library: None
    CPUContext.get_executable = linked_but_not_emitted
    for unit in units:
        print(assembly(unit, triple))


if __name__ == "__main__":
    main()
