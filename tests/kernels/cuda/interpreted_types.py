"""Types, shapes and constants of Triton's interpreter, computed once instead of at every operation."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.fast_values import loaded

WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
UNPROMOTED = frozenset((*WHOLE, "fp32", "fp64"))
"""Types of which two give the same type again, for any operation."""


class Shape(NamedTuple):
    """The properties of a block's shape; there is one object for each."""

    sizes: Any
    """As the type holds it: a Triton tuple of ints."""
    constants: Any
    """As tensors hold it: a Triton tuple of constants."""
    numel: int
    constant_numel: Any


def _shape(sizes: tuple[int, ...]) -> Shape:
    numel = validate_block_shape(sizes)
    constants = tl.core.tuple([tl.constexpr(size) for size in sizes])
    return Shape(tl.core.tuple(list(sizes)), constants, numel, tl.constexpr(numel))


NO_SHAPE = _shape(())


def block_types() -> Callable[[Any, Any, Iterable[Any]], None]:
    """Replaces `block_type.__init__`: looks its shape up."""
    known: dict[tuple[int, ...], Shape] = {}

    def make(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        result = known.get(sizes)
        if result is None:
            result = known[sizes] = _shape(sizes)
        _set_facts(self, element_ty, result)

    return make


def _set_facts(block_type: Any, element_ty: Any, facts: Shape) -> None:
    block_type.element_ty, block_type.facts = element_ty, facts
    block_type.shape, block_type.numel = facts.sizes, facts.numel


def of_element(self: Any, element_ty: Any) -> Any:
    """Replaces `block_type.with_element_ty`: the shape is known."""
    if element_ty is self.element_ty:
        return self
    made = tl.block_type.__new__(tl.block_type)
    _set_facts(made, element_ty, self.facts)
    return made


def same_block(self: Any, other: Any) -> bool:
    """Replaces `block_type.__eq__`."""
    if not isinstance(other, tl.block_type):
        return False
    return self.facts is other.facts and bool(self.element_ty == other.element_ty)


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """Replaces `tensor.__init__`."""
    facts = type.facts if isinstance(type, tl.block_type) else NO_SHAPE
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = facts.constants, facts.constant_numel


def make_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """Replaces `TensorHandle.__init__`: finds numbers of more bytes than their type without copies."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    size = data.itemsize
    if size > 1 and not isinstance(dtype, tl.pointer_type) and size * 8 > dtype.primitive_bitwidth:
        raise ValueError(f"numbers of {size * 8} bits for Triton's {dtype}")


def to_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `to_tensor`, which every assignment of a kernel calls: most assign tensors."""
    return lambda self, x, *flags: x if type(x) is tl.tensor else original(self, x, *flags)


def loaded_whole() -> Callable[..., Any]:
    """Replaces `create_load`: masks that hide nothing and the default value are made once."""
    masks: dict[Any, Any] = {}
    others: dict[Any, Any] = {}

    def load(self: Any, ptr: Any, *flags: Any) -> Any:
        shape, element = ptr.data.shape, ptr.get_element_ty()
        if shape not in masks:
            masks[shape] = interpreter.TensorHandle(np.ones(shape, bool), tl.int1)
        key = shape, element.name
        if key not in others:
            zeros = np.zeros(shape, interpreter._get_np_dtype(element))
            others[key] = interpreter.TensorHandle(zeros, element)
        return self.create_masked_load(ptr, masks[shape], others[key], *flags)

    return load


def numpy_types(original: Callable[[Any], "np.dtype[Any]"]) -> Callable[[Any], "np.dtype[Any]"]:
    """Replaces `_get_np_dtype`, which builds its table at every call."""
    known: dict[str, np.dtype[Any]] = {}

    def numpy_type(dtype: Any) -> "np.dtype[Any]":
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        result = known.get(element.name)
        if result is None:
            result = known[element.name] = original(element)
        return result

    return numpy_type


Operands = tuple[Any, Any]


def _retyped(operand: Any, block: Any) -> Any:
    """The operand as one of the block's shape, which it has only when numpy has widened it."""
    if operand.shape is block.facts.constants:
        return operand
    return tl.tensor(operand.handle, block.with_element_ty(operand.dtype))


def unwidened_operands() -> Callable[..., Operands]:
    """Replaces `broadcast_impl_value` for operands that are combined element by element: numpy widens them
    by itself, so that only their types are made to agree.
    """
    common: dict[tuple[int, int], Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any) -> Operands:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = lhs.type, rhs.type
        if not isinstance(left, tl.block_type):
            return _retyped(lhs, right), rhs
        if not isinstance(right, tl.block_type):
            return lhs, _retyped(rhs, left)
        key = id(left.facts), id(right.facts)
        block = common.get(key)
        if block is None:
            widened, other = self.broadcast_impl_value(lhs, rhs)
            common[key] = widened.type
            return widened, other
        return _retyped(lhs, block), _retyped(rhs, block)

    return operands


def checked_operands(original: Callable[..., Operands]) -> Callable[..., Operands]:
    """Replaces `binary_op_type_checking_impl`: a fast path for operands without promotion; constants
    next to a tensor of a type and shape are made once.
    """
    constants: dict[tuple[Any, ...], Any] = {}
    operands = unwidened_operands()

    def checked(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Operands:
        if not isinstance(lhs, tl.tensor):
            return original(self, lhs, rhs, *flags, **named)
        if isinstance(rhs, tl.tensor):
            left, right = lhs.dtype.name, rhs.dtype.name
            moved = right in WHOLE and isinstance(lhs.dtype, tl.pointer_type) and flags[:1] == (True,)
            if moved or (left == right and left in UNPROMOTED):
                return operands(self, lhs, rhs)
            return original(self, lhs, rhs, *flags, **named)
        if type(rhs) in (int, float) and rhs and not math.isnan(rhs):
            key = (type(rhs), rhs, lhs.dtype.name, id(lhs.shape), flags, *named.items())
            made = constants.get(key)
            if made is not None:
                return lhs, made
            same, constant = original(self, lhs, rhs, *flags, **named)
            if same is lhs:
                constant.handle.data.flags.writeable = False
                constants[key] = constant
            return same, constant
        return original(self, lhs, rhs, *flags, **named)

    return checked


def operands_of_one_shape(original: Callable[..., Operands]) -> Callable[..., Operands]:
    """Replaces `broadcast_impl_value`: the common shape of two blocks is computed once."""
    known: dict[tuple[int, int], Any] = {}

    def widened(self: Any, operand: Any, sizes: Any) -> Any:
        if operand.type.shape == sizes:
            return operand
        handle = self.builder.create_broadcast(operand.handle, sizes)
        return self.tensor(handle, tl.block_type(operand.dtype, sizes))

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> Operands:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not (isinstance(lhs.type, tl.block_type) and isinstance(rhs.type, tl.block_type)):
            return original(self, lhs, rhs)
        key = id(lhs.type.facts), id(rhs.type.facts)
        result = known.get(key)
        if result is None:
            left, right = original(self, lhs, rhs)
            known[key] = left.type.shape
            return left, right
        if len(lhs.shape) != len(rhs.shape):
            return original(self, lhs, rhs)
        return widened(self, lhs, result), widened(self, rhs, result)

    return of_one_shape


def unwrapped(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replaces `_unwrap_if_constexpr`, with a fast path for tensors, the most frequent argument."""
    plain = frozenset((tl.tensor, int, float, bool, type(None), tl.dtype))

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else original(value)

    return unwrap


def builtin_without_detours(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replaces `_patch_attr`: the function itself, with its semantics."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def called(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    scope.set_attr(obj, name, called)


def look_up_types(changes: pytest.MonkeyPatch) -> None:
    """Install all of these replacements."""
    changes.setattr(tl.block_type, "__init__", block_types())
    changes.setattr(tl.block_type, "__eq__", same_block)
    changes.setattr(tl.block_type, "with_element_ty", of_element)
    # The interpreter's builder returns the type unchanged.
    changes.setattr(tl.block_type, "to_ir", lambda self, builder: self)
    name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    changes.setattr(tl.block_type, "name", name, raising=False)
    changes.setattr(tl.block_type, "__hash__", lambda self: hash((self.element_ty, self.facts.numel)))
    changes.setattr(tl.core.dtype, "__hash__", lambda self: hash(self.name))
    changes.setattr(tl.tensor, "__init__", make_tensor)
    changes.setattr(interpreter.TensorHandle, "__init__", make_handle)
    builder = interpreter.InterpreterBuilder
    changes.setattr(builder, "create_load", loaded_whole())
    changes.setattr(TritonSemantic, "load", loaded(TritonSemantic.load))
    changes.setattr(TritonSemantic, "to_tensor", to_tensor(TritonSemantic.to_tensor))
    changes.setattr(interpreter, "_get_np_dtype", numpy_types(interpreter._get_np_dtype))
    changes.setattr(interpreter, "_patch_attr", builtin_without_detours)
    original = TritonSemantic.binary_op_type_checking_impl
    changes.setattr(TritonSemantic, "binary_op_type_checking_impl", checked_operands(original))
    changes.setattr(
        TritonSemantic, "broadcast_impl_value", operands_of_one_shape(TritonSemantic.broadcast_impl_value)
    )
    changes.setattr(tl.core, "_unwrap_if_constexpr", unwrapped(tl.core._unwrap_if_constexpr))
