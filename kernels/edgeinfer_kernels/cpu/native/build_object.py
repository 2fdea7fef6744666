"""Compile units of kernels to native object files: `python -m …native.build_object TILES FOLDER UNIT…`.

Runs as a process of its own, for three reasons: the engine need not import numba when its kernels are cached;
numba reads the target processor from its environment once per process, so that each instruction set gets its
own; and a compiler that fails takes nothing with it.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config
from numba.core.codegen import JITCodeLibrary
from numba.core.cpu import CPUContext

from edgeinfer_kernels.cpu.native.units import unit_exports

I32, I64 = ir.IntType(32), ir.IntType(64)
OBJECTS_BEFORE_COLLECTION = 200_000
"""A compiler makes many objects and little garbage: Python's own 700 cost an eighth of the time."""


def stop_before_machine_code() -> None:
    """Have numba make LLVM's code alone, a tenth faster: only whole units become machine code, by `build`."""
    JITCodeLibrary._finalize_specific = lambda library: None
    CPUContext.get_executable = linked_but_not_emitted


def linked_but_not_emitted(context: Any, library: Any, description: Any, environment: Any) -> Any:
    """In place of a callable; each function needs a builtin of its own."""
    library._ensure_finalized()
    return [].append


def wrapper_module(symbols: dict[str, tuple[str, int]]) -> str:
    """C functions `void name(int64, …)` around numba's calling convention (return slot, error slot, …)."""
    module = ir.Module("edgeinfer_wrappers")
    pointer = ir.IntType(8).as_pointer()
    for name, (native_name, count) in symbols.items():
        inside = ir.Function(
            module,
            ir.FunctionType(I32, [pointer.as_pointer(), pointer.as_pointer(), *[I64] * count]),
            native_name,
        )
        outside = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), f"edgeinfer_{name}")
        builder = ir.IRBuilder(outside.append_basic_block())
        slots = [builder.alloca(pointer) for _ in range(2)]
        builder.call(inside, [*slots, *outside.args])
        builder.ret_void()
    return str(module)


def target_machine() -> Any:
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=config.CPU_NAME,
        features=config.CPU_FEATURES,
        opt=3,
        reloc="static" if llvm.get_process_triple().startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def linked_module(unit: str, *, tiles: bool = False) -> Any:
    """The unit's functions as one LLVM module with C symbols, not yet optimised."""
    symbols, modules = {}, []
    for name, (function, signature) in unit_exports(unit, tiles=tiles).items():
        function.compile(signature)
        compiled = function.overloads[signature.args]
        symbols[name] = (compiled.fndesc.llvm_func_name, len(signature.args))
        modules.append(compiled.library.get_llvm_str())
    whole = llvm.parse_assembly(modules[0])
    for text in [*modules[1:], wrapper_module(symbols)]:
        whole.link_in(llvm.parse_assembly(text))
    for function in whole.functions:  # numba numbers its names per process: they would clash between objects
        if not function.is_declaration and not function.name.startswith("edgeinfer_"):
            function.linkage = llvm.Linkage.internal
    return whole


def optimise(module: Any, machine: Any) -> None:
    """All of LLVM's passes for this target."""
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def build(unit: str, *, tiles: bool) -> bytes:
    """The unit's native object, for numba's configured processor."""
    whole, machine = linked_module(unit, tiles=tiles), target_machine()
    optimise(whole, machine)
    return bytes(machine.emit_object(whole))


def main() -> None:
    """Write FOLDER/UNIT.o for every unit named on the command line, and its name when it is there; TILES:
    `tiles` or `no-tiles`.
    """
    kernels, folder, *units = sys.argv[1:]
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    stop_before_machine_code()
    for unit in units:
        Path(folder, f"{unit}.o").write_bytes(build(unit, tiles=kernels == "tiles"))
        print(unit, flush=True)


if __name__ == "__main__":
    main()
