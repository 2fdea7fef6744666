"""Compile units of kernels for a processor that this machine isn't: `python cross_assembly.py TRIPLE UNIT…`.

numba makes the LLVM code as for this machine, with the features of the other one; it must not turn it into
machine code, which the intrinsics of another processor would break. Runs as a process of its own, as the
build does.
"""

import json
import sys

import llvmlite.binding as llvm
from numba import config

from edgeinfer_kernels.cpu.native.build_object import linked_module, optimise, stop_before_machine_code


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
    """Print {unit: its assembly} as JSON."""
    triple, *units = sys.argv[1:]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    stop_before_machine_code()
    print(json.dumps({unit: assembly(unit, triple) for unit in units}))


if __name__ == "__main__":
    main()
