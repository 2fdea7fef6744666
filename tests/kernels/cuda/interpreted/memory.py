"""Loads and stores of Triton's interpreter by compiled loops: its functions take 16 to 30 ns an element."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.recorded_arrays import Recorder

Array = npt.NDArray[Any]
BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes of an element -> the type as which it is moved."""


@intrinsic
def read_into(typing_context: Any, array: Any, index: Any, address: Any) -> Any:
    """`array[index] = *address`, of the array's type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at = _pointers(context, builder, signature, arguments)
        value = builder.load(at)
        value.align = 1
        builder.store(value, to)
        return context.get_dummy_value()

    return types.void(array, index, address), generate


@intrinsic
def write_from(typing_context: Any, array: Any, index: Any, address: Any) -> Any:
    """`*address = array[index]`, of the array's type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of, at = _pointers(context, builder, signature, arguments)
        builder.store(builder.load(of), at).align = 1
        return context.get_dummy_value()

    return types.void(array, index, address), generate


def _pointers(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[Any, Any]:
    """Of the element of the array, and of the address."""
    array, index, address = arguments
    kind = signature.args[0]
    data = context.make_array(kind)(context, builder, array).data
    element = ir.IntType(kind.dtype.bitwidth).as_pointer()
    return builder.gep(builder.bitcast(data, element), [index]), builder.inttoptr(address, element)


@njit(cache=True, nogil=True)
def _gather(addresses, mask, found):
    for i in range(len(addresses)):
        if mask[i]:
            read_into(found, i, addresses[i])


@njit(cache=True, nogil=True)
def _gather_all(addresses, found):
    for i in range(len(addresses)):
        read_into(found, i, addresses[i])


@njit(cache=True, nogil=True)
def _scatter(addresses, mask, values):
    for i in range(len(addresses)):
        if mask[i]:
            write_from(values, i, addresses[i])


def _flat(array: Array) -> Array:
    """Its elements without strides, which repeat an element where arrays were broadcast."""
    return np.ascontiguousarray(array).reshape(-1)


def load(addresses: Array, mask: Array, other: Array, dtype: "np.dtype[Any]") -> Array:
    """The elements at the addresses where `mask` is set, elsewhere those of `other`."""
    found = np.array(other, dtype, order="C")
    _gather(_flat(addresses), _flat(mask), found.reshape(-1).view(BITS[found.itemsize]))
    return found


def load_all(addresses: Array, dtype: "np.dtype[Any]") -> Array:
    """The elements at the addresses."""
    found = np.empty(addresses.shape, dtype)
    _gather_all(_flat(addresses), found.reshape(-1).view(BITS[found.itemsize]))
    return found


def store(addresses: Array, values: Array, mask: Array) -> None:
    """Write the values to the addresses where `mask` is set; of equal addresses, the last value stays."""
    _scatter(_flat(addresses), _flat(mask), _flat(values).view(BITS[values.itemsize]))


_atomic_rmw = interpreter._interpreter.atomic_rmw
Undo = list[Callable[[], None]]


def keep(undo: Undo, addresses: Array, mask: Array, dtype: "np.dtype[Any]") -> None:
    """Add to `undo` what restores the elements that a store will replace."""
    replaced = load(addresses, mask, np.zeros(addresses.shape, dtype), dtype)
    undo.append(lambda: store(addresses, replaced, mask))


def _kept_store(undo: Undo, addresses: Array, values: Array, mask: Array) -> None:
    keep(undo, addresses, mask, values.dtype)
    store(addresses, values, mask)


def _kept_atomic(undo: Undo, kind: Any, addresses: Array, values: Array, mask: Array, order: Any) -> Any:
    keep(undo, addresses, mask, values.dtype)
    return _atomic_rmw(kind, addresses, values, mask, order)


KEPT: dict[Callable[..., Any], Callable[..., Any]] = {store: _kept_store, _atomic_rmw: _kept_atomic}
"""Functions that write to memory -> the same with a list, to which they add what undoes them."""


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are recorded while a launch is: what is in memory is no constant."""

    def call(*args: Any) -> Any:
        recorder = Recorder.current
        return function(*args) if recorder is None else recorder.call(function, args, {})

    return call


def recorded_load(addresses: Any, mask: Any, other: Any, dtype: "np.dtype[Any]") -> Any:
    """As `load`; a launch that always loads all elements is recorded without the mask."""
    recorder = Recorder.current
    if recorder is None:
        return load(addresses, mask, other, dtype)
    if isinstance(mask, np.ndarray) and mask.all():
        return recorder.call(load_all, (addresses, dtype), {})
    return recorder.call(load, (addresses, mask, other, dtype), {})


def move_compiled(changes: pytest.MonkeyPatch) -> None:
    """Install both, and record what numpy's calls don't show."""
    for name in ("_convert_float", "np_erf_fp32", "np_erf_fp64", "np_umulhi_u64"):
        changes.setattr(interpreter, name, recorded(getattr(interpreter, name)))
    changes.setattr(interpreter._interpreter, "load", recorded_load)
    changes.setattr(interpreter._interpreter, "store", recorded(store))
    changes.setattr(interpreter._interpreter, "atomic_rmw", recorded(_atomic_rmw))
