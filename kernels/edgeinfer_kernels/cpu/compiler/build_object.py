"""Compile units of kernels to native object files: `python -m …compiler.build_object FOLDER TARGET UNIT…`.

It runs in a separate process for two reasons: the engine does not import numba if its kernels are cached, and
a compiler crash does not end the engine. numba generates LLVM IR that is the same for all targets (see
`lanes.py`). The target-specific part is linked in, and LLVM then generates machine code of whole units.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.cpu import CPUContext

from edgeinfer_kernels.cpu.compiler.pipeline import forget_arrays
from edgeinfer_kernels.cpu.compiler.units import Target, unit_exports
from edgeinfer_kernels.cpu.native.simd.lanes import emit_bodies, target_operations

I32, I64 = ir.IntType(32), ir.IntType(64)
OBJECTS_BEFORE_COLLECTION = 200_000
"""Allocations between garbage collections: a compiler creates many objects and little garbage, and Python's
default of 700 costs an eighth of the time.
"""


def stop_before_linking() -> None:
    """Patch numba to stop after generating the LLVM IR of each function, because whole units are linked here,
    once. Also patch out what kernels do not use.

    numba itself would link the callees into each function, which takes a quarter of the time.
    """
    forget_arrays()
    JITCodeLibrary.add_ir_module = keep_code
    JITCodeLibrary.finalize = lambda library: None
    CPUContext.get_executable = lambda context, library, description, environment: no_callable()


def keep_code(library: Any, module: Any) -> None:
    """Replaces parsing a function's code and linking it into its library."""
    vars(library).setdefault("code", []).append(cgutils.normalize_ir_text(str(module)))


def no_callable() -> Callable[[object], None]:
    """Replaces a compiled function; each needs a distinct builtin."""
    return list[object]().append


def code_of(libraries: Iterable[Any]) -> Iterator[str]:
    """The code of libraries and of their callees, each once."""
    waiting, seen = list(libraries), set[int]()
    while waiting:
        library = waiting.pop()
        if id(library) not in seen:
            seen.add(id(library))
            yield from library.code
            waiting.extend(library._linking_libraries)


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


def target_machine(target: Target) -> Any:
    machine = llvm.Target.from_triple(llvm.get_process_triple())
    return machine.create_target_machine(
        cpu=target.processor,
        features=target.features,
        opt=3,
        reloc="static" if llvm.get_process_triple().startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def linked_module(unit: str, target: Target) -> Any:
    """The unit's functions as one LLVM module with C symbols, not yet optimized."""
    symbols, libraries = {}, []
    for name, (function, signature) in unit_exports(unit, target).items():
        function.compile(signature)
        compiled = function.overloads[signature.args]
        symbols[name] = (compiled.fndesc.llvm_func_name, len(signature.args))
        libraries.append(compiled.library)
    first, *others = code_of(libraries)
    whole = llvm.parse_assembly(first)
    for text in [*others, wrapper_module(symbols)]:
        whole.link_in(llvm.parse_assembly(text))
    used = [function.name for function in whole.functions if function.name in target_operations]
    whole.link_in(llvm.parse_assembly(str(emit_bodies(used, target.features))))
    whole.verify()
    for function in whole.functions:  # numba numbers names per process: they would clash between objects
        if not function.is_declaration and not function.name.startswith("edgeinfer_"):
            function.linkage = llvm.Linkage.internal
            if "+neon" in target.features and any(each.type.is_vector for each in function.arguments):
                # A call would pass its vectors through memory. On ARM, LLVM counts four operations for each.
                function.add_function_attribute("alwaysinline")
    return whole


def optimize(module: Any, machine: Any) -> None:
    """Run all LLVM passes for this target. Functions marked for inlining are inlined first, so that target
    operations are optimized like any others.
    """
    for level in (0, 2):
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
        passes.getModulePassManager().run(module, passes)


def build(unit: str, target: Target) -> bytes:
    """The unit's native object."""
    whole, machine = linked_module(unit, target), target_machine(target)
    optimize(whole, machine)
    return bytes(machine.emit_object(whole))


def main() -> None:
    """Write FOLDER/UNIT.o for every unit on the command line and the TARGET (JSON, the fields of `Target`).
    Print a unit's name when its file exists.
    """
    folder, described, *units = sys.argv[1:]
    target = Target(**json.loads(described))
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    stop_before_linking()
    for unit in units:
        Path(folder, f"{unit}.o").write_bytes(build(unit, target))
        print(unit, flush=True)


if __name__ == "__main__":
    main()
