"""Declares the numba functions that the engine can call by name, and their signatures."""

from collections.abc import Callable
from typing import Any

from numba import njit, types

from edgeinfer_kernels.cpu.compiler.pipeline import KernelCompiler
from edgeinfer_kernels.cpu.native.simd.structures import numba_type

KERNEL_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": KernelCompiler,
    "_nrt": False,  # kernels have no reference-counted objects
}
device_function = njit(**KERNEL_OPTIONS)
"""A function that only other kernels call; LLVM inlines it if it isn't large."""
inline_function = njit(**KERNEL_OPTIONS, forceinline=True)
"""One that is inlined however large it is: a call would pass its vectors through memory, and no register
keeps a vector during a call.
"""


class Exports(dict[str, Any]):
    """The functions of one unit that get a C symbol: name -> (numba function, signature)."""

    def add(self, name: str, *arguments: type) -> Callable[[Callable[..., None]], Any]:
        """Export the function as `name`; it returns nothing. An argument is `int`, for an int64, or a
        structure, whose address is passed.
        """

        def decorate(function: Callable[..., None]) -> Any:
            self[name] = (device_function(function), types.void(*map(numba_type, arguments)))
            return self[name][0]

        return decorate
