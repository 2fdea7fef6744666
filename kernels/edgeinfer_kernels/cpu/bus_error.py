"""Prints a message if a memory-mapped file is truncated while it is read; otherwise SIGBUS ends the program
silently.

The signal handler cannot run Python. It is machine code that writes one line and restores the default action
of SIGBUS. The read then fails again and ends the program.
"""

import ctypes
import signal
import threading
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

MESSAGE = (
    b"\nedgeinfer: a mapped model file was cut or its disk failed while it was read (SIGBUS); "
    b"see that no other program writes it, and start again\n"
)
STDERR = 2


def explain_bus_errors() -> None:
    """Install the SIGBUS message once, unless the program already handles SIGBUS. Main thread only."""
    if not hasattr(signal, "SIGBUS") or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGBUS) is signal.SIG_DFL:
        _install()


@cache
def _install() -> llvm.ExecutionEngine:
    """Compile and install the handler; the engine owns its code."""
    libc = ctypes.CDLL(None)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(_handler(libc))), machine)
    engine.finalize_object()
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGBUS, engine.get_function_address("edgeinfer_bus_error"))
    return engine


def _handler(libc: ctypes.CDLL) -> ir.Module:
    """write(2, MESSAGE, its length); signal(SIGBUS, SIG_DFL). POSIX allows both in handlers."""
    module, word, number = ir.Module("edgeinfer_bus_error"), ir.IntType(64), ir.IntType(32)
    text = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(MESSAGE)), "message")
    text.initializer, text.global_constant = ir.Constant(text.value_type, bytearray(MESSAGE)), True
    handler = ir.Function(module, ir.FunctionType(ir.VoidType(), [number]), "edgeinfer_bus_error")
    builder = ir.IRBuilder(handler.append_basic_block())

    def call(name: str, *arguments: ir.Value) -> None:
        kind = ir.FunctionType(word, [argument.type for argument in arguments])
        function_address = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
        builder.call(builder.inttoptr(ir.Constant(word, function_address), kind.as_pointer()), arguments)

    at = builder.ptrtoint(text, word)
    call("write", ir.Constant(number, STDERR), at, ir.Constant(word, len(MESSAGE)))
    call("signal", ir.Constant(number, int(signal.SIGBUS)), ir.Constant(word, 0))
    builder.ret_void()
    return module
