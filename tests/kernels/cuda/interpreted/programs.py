"""Runs many programs of a kernel at once in Triton's interpreter: numbers have an axis of programs in front.

Every array of the interpreter has the shape (programs, *block), or (1, *block) if all programs have the same
numbers. Where programs take different branches, what they stored is undone, and each group runs again by
itself. Any order of programs is valid on a GPU, so kernels can't depend on it. But programs that wait for
those of another process run again in their order, one by one: in another order, each process could wait for
a program that the other has not yet run again.
"""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.memory import Undo, keep
from tests.kernels.cuda.interpreted.recorded_arrays import NotRecordableError, Recorded, Recorder
from tests.kernels.cuda.interpreted.recordings import Recordings

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
        self._undo: Undo = []
        self._waiting: set[Any] = set()
        self._reading: set[Any] = set()
        self._kernel: Any = None

    def is_alone(self, kernel: Any) -> bool:
        """Whether the kernel isn't known to exchange numbers with another process or the CPU."""
        return kernel not in self._waiting and kernel not in self._reading

    def run_all(self, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Run the programs of a grid, the last index first to change."""
        self._kernel, self._undo = kernel, []
        indices = np.indices(grid, np.int32).reshape(3, -1).T
        at = 0
        while at < len(indices):
            if Recorder.current is None:
                self._undo.clear()
            count = 1 if kernel in self._waiting else MAX_PROGRAMS
            self._run(indices[at : at + count], arguments)
            at += count

    def _run(self, indices: Numbers, arguments: dict[str, Any]) -> None:
        recorder = Recorder.current
        mark = recorder and recorder.mark()
        self.indices, before = indices, len(self._undo)
        try:
            self._kernel(**arguments)
        except DivergedError as diverged:
            self._undo_to(before)
            if recorder and mark:
                recorder.undo(mark)
            values = np.arange(len(indices)) if self._kernel in self._reading else diverged.values
            for value in dict.fromkeys(values.tolist()):
                self._run(indices[values == value], arguments)

    def _undo_to(self, count: int) -> None:
        while len(self._undo) > count:
            self._undo.pop()()

    def undo_all(self) -> None:
        """Memory is as it was before the launch that is recorded."""
        self._undo_to(0)

    def before_store(self, addresses: Any, mask: Any, dtype: "np.dtype[Any]") -> None:
        """Keep what a store replaces, if it may have to be undone."""
        if Recorder.current is not None:
            Recorder.current.stores += 1
        elif len(self.indices) == 1:
            return
        addresses, mask = (each.value if type(each) is Recorded else each for each in (addresses, mask))
        keep(self._undo, addresses, mask, dtype)

    def read_of_others(self) -> None:
        """These programs read what another process may write while they run."""
        self._reading.add(self._kernel)

    def run_one_by_one(self) -> None:
        """Programs of this kernel exchange numbers with the CPU or with each other while they run."""
        self._waiting.add(self._kernel)
        if len(self.indices) > 1:
            raise DivergedError(np.arange(len(self.indices)))

    def id(self, axis: int) -> Numbers:
        """The index of each program on an axis of the grid."""
        ids = self.indices[:, axis]
        return ids[:1] if (ids == ids[0]).all() else ids


def one_value(data: Any) -> Any:
    """The value that all programs have."""
    if type(data) is Recorded:
        data = data.recorder.read(data)
    values = data.reshape(-1)
    if values.size > 1 and not (values == values[0]).all():
        raise DivergedError(values)
    return values[0].item()


PLAIN = (bool, int, str, type(None), tl.dtype, tl.constexpr, interpreter.InterpretedFunction)


def launch_key(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """All of an argument that numpy calls depend on, except the addresses of `tensors`, which are added."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor", value.dtype
    if isinstance(value, tuple):
        return type(value), tuple([launch_key(each, tensors) for each in value])
    if type(value) is float:
        return value.hex()
    if isinstance(value, PLAIN):
        return type(value), value
    raise NotRecordableError(f"an argument of {type(value)}")


def _converted(value: Any, pointers: list[Recorded]) -> Any:
    """A kernel's argument as its code takes it; tensors are the pointers, one after another."""
    if isinstance(value, tuple):
        parts = [_converted(each, pointers) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    result = interpreter._implicit_cvt(value)
    if pointers and isinstance(value, torch.Tensor):
        result.handle.data = pointers.pop(0)
    return result


class Launcher:
    """Runs launches: replays those that it knows, and interprets the others."""

    def __init__(self, programs: ProgramGroup) -> None:
        self._programs = programs
        self._recordings = Recordings()
        self._names: dict[Any, frozenset[str]] = {}

    def run(self, function: Any, args: Sequence[Any], grid: Any, named: dict[str, Any]) -> None:
        """Replaces `InterpretedFunction.run`, for tensors in the CPU's memory."""
        names = self._names.get(function)
        if names is None:
            names = self._names[function] = frozenset(function.arg_names)
        named = {name: value for name, value in named.items() if name in names}
        arguments = (*args, *named.values())
        tensors: list[torch.Tensor] = []
        try:
            if callable(grid) or function.pre_run_hooks or not self._programs.is_alone(function.rewrite()):
                raise NotRecordableError("a kernel that isn't alone")
            key = function, grid, MAX_PROGRAMS, tuple(named), launch_key(arguments, tensors)
        except NotRecordableError:
            return self.interpret(_executor(function, grid), args, named)
        pointers = [np.array([each.data_ptr()], np.uint64) for each in tensors]
        if not self._recordings.replay(key, pointers):
            if self._recordings.is_due(key):
                self._record(key, Recorder(pointers), _executor(function, grid), args, named)
            else:
                self.interpret(_executor(function, grid), args, named)
        return None

    def _record(
        self, key: Hashable, recorder: Recorder, executor: Any, args: Sequence[Any], named: dict[str, Any]
    ) -> None:
        """Interpret and record a launch; interpret it again if that fails."""
        Recorder.current = recorder
        try:
            self.interpret(executor, args, named, recorder.pointers.copy())
        except (NotRecordableError, Exception):
            Recorder.current = None
            self._programs.undo_all()
            self._recordings.refuse(key)
            self.interpret(executor, args, named)
        else:
            self._recordings.add(key, recorder.finish())
        finally:
            Recorder.current = None

    def interpret(
        self, executor: Any, args: Sequence[Any], named: dict[str, Any], pointers: Sequence[Recorded] = ()
    ) -> None:
        for hook in executor.pre_run_hooks:
            hook(*args, **named)
        scope = interpreter._patch_lang(executor.fn)
        try:
            remaining = list(pointers)
            given = [*zip(executor.arg_names, args, strict=False), *named.items()]
            arguments = {
                name: value if name in executor.constexprs else _converted(value, remaining)
                for name, value in given
            }
            if remaining:
                raise NotRecordableError("a tensor as a constant")
            for name, value in inspect.getcallargs(executor.fn, *args, **named).items():
                if name not in arguments:
                    arguments[name] = value if name in executor.constexprs else _converted(value, [])
            grid = executor.grid(arguments) if callable(executor.grid) else executor.grid
            grid = (*grid, *(1,) * (3 - len(grid)))
            interpreter.interpreter_builder.set_grid_dim(*grid)
            try:
                self._programs.run_all(executor.fn, arguments, grid)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()


def _executor(function: Any, grid: Any) -> Any:
    return interpreter.GridExecutor(function.rewrite(), function.arg_names, grid, function.pre_run_hooks)


def run_together(changes: pytest.MonkeyPatch) -> ProgramGroup:
    """Run the programs of a grid together; arrays get their axis from `program_arrays.py`."""
    programs = ProgramGroup()
    launcher = Launcher(programs)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if not warmup:
            launcher.run(self, args, grid, named)

    changes.setattr(interpreter.InterpretedFunction, "run", run)
    return programs
