"""Operations of Triton's interpreter on arrays of (programs, *block)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.programs import Numbers, ProgramGroup, one_value
from tests.kernels.cuda.interpreted.recorded_arrays import Recorded

Handle = Any
"""Triton's `TensorHandle`: an array and the type of its elements."""


def _handle(data: Numbers, like: Handle) -> Handle:
    return interpreter.TensorHandle(data, like.dtype.scalar)


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(getattr(size, "value", size) for size in shape)


def of_rank(data: Numbers, rank: int) -> Numbers:
    """The array with axes of 1 between the programs and the block, up to `rank` axes."""
    missing = rank - data.ndim
    return data.reshape(data.shape[0], *(1,) * missing, *data.shape[1:]) if missing > 0 else data


def of_one_rank(*arrays: Numbers) -> list[Numbers]:
    """The arrays such that numpy combines the numbers of the same program."""
    rank = max(array.ndim for array in arrays)
    return [of_rank(array, rank) for array in arrays]


def binary_op(self: Any, lhs: Handle, rhs: Handle, op: Any) -> Handle:
    """Replaces the method of this name."""
    left, right = lhs.data, rhs.data
    if left.ndim != right.ndim:
        left, right = of_one_rank(left, right)
    output, dtype = op(left, right), lhs.dtype.scalar
    if not isinstance(dtype, tl.pointer_type) and output.itemsize * 8 > max(dtype.primitive_bitwidth, 8):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


def with_aligned_operands(original: Callable[..., Handle], count: int) -> Callable[..., Handle]:
    """The operation, whose first `count` operands get the same rank."""

    def operation(self: Any, *operands: Any) -> Handle:
        if len({each.data.ndim for each in operands[:count]}) == 1:
            return original(self, *operands)
        arrays = of_one_rank(*(each.data for each in operands[:count]))
        made = [
            interpreter.TensorHandle(array, each.dtype)
            for array, each in zip(arrays, operands[:count], strict=True)
        ]
        return original(self, *made, *operands[count:])

    return operation


def bytes_of(pointer: Handle) -> int:
    """Bytes of an element that the addresses point to."""
    bits: int = pointer.get_element_ty().primitive_bitwidth
    return max(1, bits // 8)


def add_pointer(self: Any, pointer: Handle, offset: Handle) -> Handle:
    """Replaces `create_addptr`."""
    addresses, elements = pointer.data, offset.data
    if addresses.ndim != elements.ndim:
        addresses, elements = of_one_rank(addresses, elements)
    moved = np.multiply(elements, bytes_of(pointer), dtype=np.int64).view(np.uint64)
    return interpreter.TensorHandle(addresses + moved, pointer.dtype)


def expand_dims(self: Any, handle: Handle, axis: int) -> Handle:
    """An index instead of numpy's function, which checks its axes."""
    return _handle(handle.data[(slice(None),) * (axis + 1) + (None,)], handle)


def broadcast(self: Any, handle: Handle, shape: Any) -> Handle:
    sizes = _sizes(shape)
    data = of_rank(handle.data, len(sizes) + 1)
    return _handle(np.broadcast_to(data, (data.shape[0], *sizes)), handle)


def splat(self: Any, block: Any, handle: Handle) -> Handle:
    data, sizes = handle.data.reshape(-1), _sizes(block.shape)
    if data.size == 1 and type(data) is not Recorded:
        return _handle(np.full((1, *sizes), data[0], data.dtype), handle)
    return _handle(np.broadcast_to(of_rank(data, len(sizes) + 1), (data.size, *sizes)), handle)


def unsplat(self: Any, handle: Handle) -> Handle:
    return _handle(handle.data.reshape(handle.data.shape[0]), handle)


def reshape(self: Any, handle: Handle, shape: Any, allow_reorder: bool) -> Handle:
    return _handle(handle.data.reshape(handle.data.shape[0], *_sizes(shape)), handle)


def transpose(self: Any, handle: Handle, order: Sequence[int]) -> Handle:
    return _handle(np.transpose(handle.data, (0, *(axis + 1 for axis in order))), handle)


def make_range(self: Any, block: Any, start: int, stop: int) -> Handle:
    return interpreter.TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)


def concatenate(self: Any, lhs: Handle, rhs: Handle) -> Handle:
    count = max(lhs.data.shape[0], rhs.data.shape[0])
    parts = [np.broadcast_to(each.data, (count, *each.data.shape[1:])) for each in (lhs, rhs)]
    return _handle(np.concatenate(parts, axis=1), lhs)


def join(self: Any, lhs: Handle, rhs: Handle) -> Handle:
    return _handle(np.stack(np.broadcast_arrays(lhs.data, rhs.data), axis=-1), lhs)


def gather(self: Any, source: Handle, indices: Handle, axis: int) -> Handle:
    return _handle(
        np.take_along_axis(source.data, indices.data, axis=axis + 1 if axis >= 0 else axis), source
    )


def masked_loads(programs: ProgramGroup) -> Callable[..., Handle]:
    """Replaces `create_masked_load`."""

    def masked_load(
        self: Any, pointers: Handle, mask: Handle, other: Handle | None, cache: Any, eviction: Any,
        is_volatile: bool,
    ) -> Handle:  # fmt: skip
        if is_volatile:
            programs.read_of_others()
        element = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(element)
        missing = np.zeros((1,) * pointers.data.ndim, dtype) if other is None else other.data
        arrays = _of_one_shape(pointers.data, mask.data, missing)
        return interpreter.TensorHandle(interpreter._interpreter.load(*arrays, dtype), element)

    return masked_load


def _of_one_shape(first: Numbers, *others: Numbers) -> Sequence[Numbers]:
    if all(each.shape == first.shape for each in others):
        return (first, *others)
    return np.broadcast_arrays(*of_one_rank(first, *others))


def stores(programs: ProgramGroup) -> dict[str, Callable[..., Any]]:
    """Replacements of the operations that write to memory."""
    scopes = interpreter.InterpreterBuilder.ir_sem_to_interpreter_sem
    operations = interpreter.InterpreterBuilder.ir_rmw_op_to_interpreter_rmw_op

    def masked_store(self: Any, pointers: Handle, value: Handle, mask: Handle, *flags: Any) -> Any:
        addresses, data, which = _of_one_shape(pointers.data, value.data, mask.data)
        programs.before_store(addresses, which, data.dtype)
        return interpreter._interpreter.store(addresses, data, which)

    def store(self: Any, pointers: Handle, value: Handle, *flags: Any) -> Any:
        mask = np.ones((1,) * pointers.data.ndim, bool)
        return masked_store(self, pointers, value, interpreter.TensorHandle(mask, tl.int1))

    def atomic_rmw(
        self: Any, kind: Any, pointers: Handle, value: Handle, mask: Handle, sem: Any, scope: Any
    ) -> Handle:
        if scope == SYSTEM:
            programs.run_one_by_one()
        addresses, data, which = _of_one_shape(pointers.data, value.data, mask.data)
        count = len(programs.indices)  # Each program adds, even if all have the same numbers.
        addresses, data, which = (
            np.broadcast_to(each, (count, *each.shape[1:])).copy() for each in (addresses, data, which)
        )
        programs.before_store(addresses, which, data.dtype)
        before = interpreter._interpreter.atomic_rmw(operations[kind], addresses, data, which, scopes[sem])
        return _handle(before, value)

    return {
        "create_masked_store": masked_store,
        "create_store": store,
        "create_atomic_rmw": atomic_rmw,
        "create_get_program_id": lambda self, axis: interpreter.TensorHandle(programs.id(axis), tl.int32),
    }


SYSTEM = interpreter._ir.MEM_SYNC_SCOPE.SYSTEM


def is_true(self: Any) -> bool:
    """Replaces `tensor.__bool__`: blocks of several numbers are true, as in the interpreter."""
    is_number = not isinstance(self.type, tl.block_type) or self.type.numel == 1
    return bool(one_value(self.handle.data)) if is_number else True


def transposed(self: Any) -> Any:
    """Replaces `tensor.T`."""
    sizes = list(self.type.shape)
    sizes[-1], sizes[-2] = sizes[-2], sizes[-1]
    data = np.swapaxes(self.handle.data, -1, -2)
    return tl.core.tensor(_handle(data, self.handle), tl.block_type(self.dtype, sizes))


ALIGNED = {
    **dict.fromkeys(("create_idiv", "create_ashr", "create_umulhi"), 2),
    **dict.fromkeys(("create_fma", "create_select", "create_clampf"), 3),
}
"""Operation -> its operands, which get the same rank."""


def add_program_axis(changes: pytest.MonkeyPatch, programs: ProgramGroup) -> None:
    """Install these operations."""
    builder = interpreter.InterpreterBuilder
    replaced = {
        "binary_op": binary_op,
        "create_addptr": add_pointer,
        "create_expand_dims": expand_dims,
        "create_broadcast": broadcast,
        "create_splat": splat,
        "create_unsplat": unsplat,
        "create_reshape": reshape,
        "create_trans": transpose,
        "create_make_range": make_range,
        "create_cat": concatenate,
        "create_join": join,
        "create_gather": gather,
        "create_masked_load": masked_loads(programs),
        **stores(programs),
        **{name: with_aligned_operands(getattr(builder, name), count) for name, count in ALIGNED.items()},
    }
    for name, operation in replaced.items():
        changes.setattr(builder, name, operation)
