"""Reductions and scans of Triton's interpreter on arrays of (programs, *block)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.programs import Numbers


def to_tensor(self: Any, data: Numbers, dtype: Any) -> Any:
    """A tensor of (programs, *block)."""
    handle = interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(dtype), copy=False), dtype.scalar)
    return tl.core.tensor(handle, tl.block_type(dtype, list(data.shape[1:])) if data.ndim > 1 else dtype)


def _axis_of(self: Any, data: Numbers) -> tuple[Numbers, int]:
    """The array and its axis to be reduced: without a given axis, that of all numbers of a program."""
    if self.axis is None:
        return data.reshape(data.shape[0], -1), 1
    return data, self.axis + 1 if self.axis >= 0 else data.ndim + self.axis


def _with_kept_axes(self: Any, reduced: Numbers, whole: Numbers, axis: int) -> Numbers:
    if not self.keep_dims:
        return reduced
    if self.axis is None:
        return reduced.reshape(reduced.shape[0], *(1,) * (whole.ndim - 1))
    return np.expand_dims(reduced, axis)


def _reduced(self: Any, whole: Numbers, operation: Any) -> Numbers:
    data, axis = _axis_of(self, whole)
    return _with_kept_axes(self, operation(data, axis=axis), whole, axis)


def total(self: Any, operand: Any) -> Any:
    """Replaces `ReduceOps.sum`."""
    return self.to_tensor(_reduced(self, operand.handle.data, np.sum), operand.dtype)


def min_max(self: Any, operand: Any, val_reduce_op: Any = None, idx_reduce_op: Any = None) -> Any:
    """Replaces `ReduceOps.min_max`."""
    operand = operand[0] if isinstance(operand, tuple) else operand
    pairs = (val_reduce_op, operand.dtype), (idx_reduce_op, tl.int32)
    found = [
        self.to_tensor(_reduced(self, operand.handle.data, operation), dtype)
        for operation, dtype in pairs
        if operation
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _combined(self: Any, state: Sequence[Any], following: Sequence[Any]) -> tuple[Any, ...]:
    result = self.combine_fn.fn(*state, *following)
    return result if isinstance(result, tuple) else (result,)


def _slices(self: Any, operands: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The operands at each index of the axis."""
    found = [_axis_of(self, each.handle.data) for each in operands]
    return [
        tuple(
            self.to_tensor(np.take(data, index, axis), each.dtype)
            for (data, axis), each in zip(found, operands, strict=True)
        )
        for index in range(found[0][0].shape[found[0][1]])
    ]


def reduce(self: Any, operands: Sequence[Any]) -> list[Any]:
    """Replaces `ReduceOps.generic_reduce`: one index of the axis after another, for all others at once."""
    state, *others = _slices(self, operands)
    for each in others:
        state = _combined(self, state, each)
    results = []
    for made, operand in zip(state, operands, strict=True):
        whole = operand.handle.data
        kept = _with_kept_axes(self, made.handle.data, whole, _axis_of(self, whole)[1])
        results.append(self.to_tensor(kept, operand.dtype))
    return results


def scan(self: Any, operands: Sequence[Any]) -> list[Any]:
    """Replaces `ScanOps.generic_scan`."""
    states = _slices(self, operands)
    for index in range(1, len(states)):
        states[index] = _combined(self, states[index - 1], states[index])
    axis = _axis_of(self, operands[0].handle.data)[1]
    return [
        self.to_tensor(np.stack([state[i].handle.data for state in states], axis), operand.dtype)
        for i, operand in enumerate(operands)
    ]


def apply_scan(self: Any, operands: Sequence[Any]) -> Any:
    """Replaces `ScanOps.apply_impl`."""
    axis = _axis_of(self, operands[0].handle.data)[1]
    turned = [np.flip(each.handle.data, axis) if self.reverse else each.handle.data for each in operands]
    given = [self.to_tensor(data, each.dtype) for data, each in zip(turned, operands, strict=True)]
    known: dict[Any, Any] = {standard._sum_combine: np.cumsum, standard._prod_combine: np.cumprod}
    operation = known.get(self.combine_fn)
    if operation:
        results = [self.to_tensor(operation(given[0].handle.data, axis=axis), given[0].dtype)]
    else:
        results = scan(self, given)
    for each in results if self.reverse else ():
        each.handle.data = np.flip(each.handle.data, axis)
    return results


def reduce_by_program(changes: pytest.MonkeyPatch) -> None:
    """Install these reductions."""
    changes.setattr(interpreter.ReduceScanOpInterface, "to_tensor", to_tensor)
    changes.setattr(interpreter.ReduceOps, "sum", total)
    changes.setattr(interpreter.ReduceOps, "min_max", min_max)
    changes.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
    changes.setattr(interpreter.ScanOps, "apply_impl", apply_scan)
