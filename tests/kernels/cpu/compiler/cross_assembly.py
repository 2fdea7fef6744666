"""Compile kernel units for another processor: `cross_assembly.py TRIPLE JOBS`.

JOBS: JSON, a list of [the fields of `Target`, units]. numba makes the LLVM code as for this machine. Runs in
a separate process, as the build does.
"""

import json
import sys

import llvmlite.binding as llvm

from edgeinfer_kernels.cpu.compiler.build_object import linked_module, optimize, stop_before_linking
from edgeinfer_kernels.cpu.compiler.units import Target


def assembly(unit: str, triple: str, target: Target) -> str:
    """The unit's assembly for a target of another architecture."""
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=target.processor, features=target.features, opt=3
    )
    module = linked_module(unit, target)
    module.triple = triple
    module.data_layout = str(machine.target_data)
    optimize(module, machine)
    return str(machine.emit_assembly(module))


def main() -> None:
    """Print a list of {unit: its assembly} as JSON."""
    triple, jobs = sys.argv[1:]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    stop_before_linking()
    result = [
        {unit: assembly(unit, triple, Target(**target)) for unit in units}
        for target, units in json.loads(jobs)
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
