"""Declares the numba functions that the engine can call by name, and their signatures."""

from collections.abc import Callable
from typing import Any

from numba import njit, types

from edgeinfer_kernels.cpu.compiler.pipeline import KernelCompiler

inner = njit(
    nogil=True,
    boundscheck=False,
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    pipeline_class=KernelCompiler,
    _nrt=False,  # kernels have no reference-counted objects
)
"""A function that only other kernels call; LLVM inlines it."""


class Exports(dict[str, Any]):
    """The functions of one unit that get a C symbol: name -> (numba function, number of int64 arguments)."""

    def add(self, name: str, arguments: int) -> Callable[[Callable[..., None]], Any]:
        """Export the function, compiled for `arguments` int64, as `name`; it returns nothing."""

        def decorate(function: Callable[..., None]) -> Any:
            signature = types.void(*(types.int64,) * arguments)
            self[name] = (inner(function), signature)
            return self[name][0]

        return decorate
