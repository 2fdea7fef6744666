"""Runs many programs of a kernel at once in Triton's interpreter: numbers have an axis of programs in front.

Every array of the interpreter has the shape (programs, *block), or (1, *block) if all programs have the same
numbers. Where programs take different branches, what they stored is undone, and each group runs again by
itself. Any order of programs is valid on a GPU, so kernels can't depend on it. But programs that wait for
those of another process run again in their order, one by one: in another order, each process could wait for
a program that the other has not yet run again.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from triton.runtime import interpreter

MAX_PROGRAMS = 64
"""Programs at once: their numbers should stay in the processor's cache."""
Numbers = npt.NDArray[Any]


class DivergedError(BaseException):
    """Programs continue differently: `values` has one value for each. No kernel's handler catches it."""

    def __init__(self, values: Numbers) -> None:
        super().__init__("programs of a group continue differently")
        self.values = values


class ProgramGroup:
    """The programs that run now, and how to undo what they stored."""

    def __init__(self) -> None:
        self.indices = np.zeros((1, 3), np.int32)
        self._undo: list[Callable[[], None]] = []
        self._waiting: set[Any] = set()
        self._kernel: Any = None
        self._reads_others = False

    def run_all(self, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Run the programs of a grid, the last index first to change."""
        self._kernel = kernel
        indices = np.indices(grid, np.int32).reshape(3, -1).T
        at = 0
        while at < len(indices):
            count = 1 if kernel in self._waiting else MAX_PROGRAMS
            self._run(indices[at : at + count], arguments)
            at += count

    def _run(self, indices: Numbers, arguments: dict[str, Any]) -> None:
        self.indices, self._undo, self._reads_others = indices, [], False
        try:
            self._kernel(**arguments)
        except DivergedError as diverged:
            for undo in reversed(self._undo):
                undo()
            values = np.arange(len(indices)) if self._reads_others else diverged.values
            for value in dict.fromkeys(values.tolist()):
                self._run(indices[values == value], arguments)

    def before_store(self, addresses: Numbers, mask: Numbers, dtype: "np.dtype[Any]") -> None:
        """Keep what a store replaces, if it may have to be undone."""
        if len(self.indices) > 1:
            zeros = np.zeros(addresses.shape, dtype)
            replaced = interpreter._interpreter.load(addresses, mask, zeros, dtype)
            self._undo.append(lambda: interpreter._interpreter.store(addresses, replaced, mask))

    def read_of_others(self) -> None:
        """These programs read what another process may write while they run."""
        self._reads_others = True

    def run_one_by_one(self) -> None:
        """Programs of this kernel exchange numbers with the CPU or with each other while they run."""
        self._waiting.add(self._kernel)
        if len(self.indices) > 1:
            raise DivergedError(np.arange(len(self.indices)))

    def id(self, axis: int) -> Numbers:
        """The index of each program on an axis of the grid."""
        ids = self.indices[:, axis]
        return ids[:1] if (ids == ids[0]).all() else ids


def one_value(data: Numbers) -> Any:
    """The value that all programs have."""
    values = data.reshape(-1)
    if values.size > 1 and not (values == values[0]).all():
        raise DivergedError(values)
    return values[0].item()


def grid_call(programs: ProgramGroup) -> Callable[..., None]:
    """Replaces `GridExecutor.__call__`, which runs the programs one after another."""

    def call(self: Any, *device_args: Any, **named: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        named = {name: value for name, value in named.items() if name in names}
        host_args, host_named = self._init_args_hst(device_args, named)
        for hook in self.pre_run_hooks:
            hook(*host_args, **host_named)
        scope = interpreter._patch_lang(self.fn)
        try:
            given = inspect.getcallargs(self.fn, *host_args, **host_named)
            arguments = {
                name: value if name in self.constexprs else interpreter._implicit_cvt(value)
                for name, value in given.items()
            }
            grid = self.grid(arguments) if callable(self.grid) else self.grid
            grid = (*grid, *(1,) * (3 - len(grid)))
            interpreter.interpreter_builder.set_grid_dim(*grid)
            try:
                programs.run_all(self.fn, arguments, grid)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()
        self._restore_args_dev(device_args, host_args, named, host_named)

    return call


def run_together(changes: pytest.MonkeyPatch) -> ProgramGroup:
    """Run the programs of a grid together; arrays get their axis from `program_arrays.py`."""
    programs = ProgramGroup()
    changes.setattr(interpreter.GridExecutor, "__call__", grid_call(programs))
    return programs
