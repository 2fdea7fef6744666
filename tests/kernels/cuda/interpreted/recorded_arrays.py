"""Arrays that record the numpy calls made with them, for one launch of an interpreted kernel.

They are no arrays to numpy, so that a function which would take their numbers unrecorded fails.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from operator import getitem
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

Numbers = npt.NDArray[Any]


class NotRecordableError(BaseException):
    """The kernel does what isn't recorded. No kernel's handler catches it."""


Call = tuple[Callable[..., Any], tuple[int, ...], int]
"""A function, the indices of the values that are its arguments, and that of its result."""


class Segment:
    """The calls up to the next number that the kernel's Python code reads.

    `values` from index `start` on: constants, and None for results. `number`: the index of what is read at
    the end, None at the end of the kernel; `is_undone`: whether a call undoes stores.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.values: list[Any] = []
        self.calls: list[Call] = []
        self.number: int | None = None
        self.is_undone = False


class Recorder:
    """Records the launch that runs now. Value 0 is the list of what undoes stores; then the pointers."""

    current: "Recorder | None" = None

    def __init__(self, pointers: Sequence[Numbers]) -> None:
        self.path: list[tuple[Segment, Any]] = []
        """The segments before, each with the number that was read at its end."""
        self.segment = Segment(1)
        self.stores = 0
        """The number of stores since the kernel's start."""
        self._constants: dict[int, int] = {}
        self.pointers = [Recorded(self, self._add(None), pointer) for pointer in pointers]

    def call(self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Call and record it."""
        if named:
            function = partial(function, **named)
        indices, plain = [], []
        for each in args:
            if type(each) is Recorded:
                if each.recorder is not self:
                    raise NotRecordableError("an array of an earlier launch")
                indices.append(each.index)
                plain.append(each.value)
            elif type(each) in (tuple, list) and any(type(part) is Recorded for part in each):
                return self.call(partial(_call_with_sequences, function, _layout(args)), _flat(args), {})
            else:
                indices.append(self._constant(each))
                plain.append(each)
        result = function(*plain)
        at = self._add(None)
        self.segment.calls.append((function, tuple(indices), at))
        if type(result) is np.ndarray:
            return Recorded(self, at, result)
        if result is not None:
            raise NotRecordableError(f"a call that returns {type(result).__name__}")
        return None

    def read(self, array: "Recorded") -> Numbers:
        """The numbers, for Python code whose further calls may depend on them."""
        self.segment.number = array.index
        self.path.append((self.segment, number_of(array.value)))
        self.segment = Segment(self.segment.start + len(self.segment.values))
        self._constants = {}
        return array.value

    def mark(self) -> tuple[Segment, int, int, int]:
        """The present, for `undo`."""
        return self.segment, len(self.segment.calls), len(self.segment.values), self.stores

    def undo(self, mark: tuple[Segment, int, int, int]) -> None:
        """All stores since `mark` are undone. If the calls since have no further effect, they are removed."""
        segment, calls, values, stores = mark
        if segment is self.segment:
            del segment.calls[calls:], segment.values[values:]
            self._constants = {}
        elif self.stores > stores:
            self.segment.is_undone = True
            arguments = (0, self._constant(self.stores - stores))
            self.segment.calls.append((undo_last, arguments, self._add(None)))
        self.stores = stores

    def finish(self) -> list[tuple[Segment, Any]]:
        """All segments with the numbers read at their ends."""
        return [*self.path, (self.segment, None)]

    def _add(self, value: Any) -> int:
        values = self.segment.values
        values.append(value)
        return self.segment.start + len(values) - 1

    def _constant(self, value: Any) -> int:
        index = self._constants.get(id(value))
        if index is None:
            index = self._constants[id(value)] = self._add(value)
        return index


def number_of(array: Numbers) -> tuple[Any, ...]:
    """What Python code reads of an array: the number of all programs, or that of each."""
    numbers = array.reshape(-1).tolist()
    return (numbers[0],) if numbers.count(numbers[0]) == len(numbers) else tuple(numbers)


def undo_last(undo: list[Callable[[], None]], count: int) -> None:
    """Undo the last `count` stores."""
    for _ in range(count):
        undo.pop()()


def _layout(args: Sequence[Any]) -> list[int | None]:
    """The number of parts of each sequence among the arguments, None for others."""
    return [len(each) if type(each) in (tuple, list) else None for each in args]


def _flat(args: Sequence[Any]) -> list[Any]:
    """The arguments with the parts of sequences."""
    return [part for each in args for part in (each if type(each) in (tuple, list) else (each,))]


def _call_with_sequences(function: Callable[..., Any], layout: Sequence[int | None], *flat: Any) -> Any:
    rest = iter(flat)
    return function(*[next(rest) if size is None else list(islice(rest, size)) for size in layout])


def _expanded(array: Any, shape: tuple[int, ...]) -> Any:
    """As `np.broadcast_to`, which takes as long as an operation."""
    if array.shape == shape:
        return array
    if type(array) is not Recorded:
        return np.broadcast_to(array, shape)
    if not array.value.flags.c_contiguous:
        return array.recorder.call(np.broadcast_to, (array, shape), {})
    strides = np.broadcast_to(array.value, shape).strides
    return array.recorder.call(np.ndarray, (shape, array.dtype, array, 0, strides), {})


class Recorded(NDArrayOperatorsMixin):
    """An array of the launch that is recorded, as the kernel's operations use it."""

    __slots__ = ("index", "recorder", "value")

    def __init__(self, recorder: Recorder, index: int, value: Numbers) -> None:
        self.recorder, self.index, self.value = recorder, index, value

    def __array__(self, *_: Any, **__: Any) -> Numbers:
        raise NotRecordableError("a conversion to an array")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        if "out" in named:
            raise NotRecordableError("a result in place")
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return self.recorder.call(function, inputs, named)

    def __array_function__(self, function: Any, _: Any, args: Any, named: Any) -> Any:
        if function is np.broadcast_to:
            return _expanded(*args)
        if function is np.broadcast_arrays:
            shape = np.broadcast_shapes(*(each.shape for each in args))
            return [_expanded(each, shape) for each in args]
        return self.recorder.call(function, args, named)

    def __getattr__(self, name: str) -> Any:
        raise NotRecordableError(f"the attribute {name} of an array")

    def __bool__(self) -> bool:
        raise NotRecordableError("a condition")

    def __getitem__(self, index: Any) -> Any:
        return self.recorder.call(getitem, (self, index), {})

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        if not copy and self.value.dtype == dtype:
            return self
        return self.recorder.call(np.ndarray.astype, (self, dtype), {})

    def view(self, dtype: Any) -> Any:
        return self.recorder.call(np.ndarray.view, (self, dtype), {})

    def reshape(self, *shape: Any) -> Any:
        return self.recorder.call(np.ndarray.reshape, (self, *shape), {})

    def copy(self) -> Any:
        return self.recorder.call(np.ndarray.copy, (self,), {})

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    itemsize = property(lambda self: self.value.itemsize)
