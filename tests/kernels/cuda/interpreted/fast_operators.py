"""The operators of Triton's tensors for the usual operands, without a search for their common type."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.fast_values import common_facts, converted, indexed, of_facts
from tests.kernels.cuda.interpreted.program_arrays import add_pointer, bytes_of

SIGNED = frozenset(("int32", "int64"))
WHOLE = SIGNED | {"uint32"}
FLOATS = frozenset(("fp32",))
BITS = WHOLE | {"int1"}
Operator = Callable[[Any, Any], Any]


def combined(
    slow: Operator, operation: Any, types: frozenset[str], constants: frozenset[str], compares: bool = False
) -> Operator:
    """An operator of two tensors of as many axes and one of these `types`, or of a tensor of one of the types
    `constants` and a number; `slow` otherwise.
    """
    numbers = {name: (int,) if name in WHOLE else (int, float) for name in constants}
    common = common_facts()

    def fast(self: Any, other: Any) -> Any:
        left, block, name = self.handle.data, self.type, self.dtype.name
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is tl.tensor:
            right = other.handle.data
            if name != other.dtype.name or name not in types or left.ndim != right.ndim:
                return slow(self, other)
            if self.shape is not other.shape:
                facts = common(self.type, other.type)
                if facts is None:
                    return slow(self, other)
                block = of_facts(self.dtype, facts)
        elif type(other) in numbers.get(name, ()) and 0 <= other < 1 << 31:
            right = other
        else:
            return slow(self, other)
        dtype = self.dtype
        if compares:
            dtype = tl.int1
            block = block.with_element_ty(dtype) if isinstance(block, tl.block_type) else dtype
        return tl.tensor(interpreter.TensorHandle(operation(left, right), dtype), block)

    return fast


def sum_or_pointer(slow: Operator, numbers: Operator) -> Operator:
    """An address and an offset: a number, or a signed one of as many axes; `numbers` otherwise."""
    common = common_facts()

    def fast(self: Any, other: Any) -> Any:
        if not isinstance(self.dtype, tl.pointer_type):
            return numbers(self, other)
        if type(other) is int and other >= 0:
            handle = self.handle
            moved = handle.data + np.uint64(other * bytes_of(handle))
            return tl.tensor(interpreter.TensorHandle(moved, handle.dtype), self.type)
        if type(other) is not tl.tensor:
            return numbers(self, other)
        if other.dtype.name not in SIGNED:
            return slow(self, other)
        if self.shape is other.shape:
            block = self.type
        elif isinstance(other.type, tl.block_type) and not isinstance(self.type, tl.block_type):
            block = other.type.with_element_ty(self.dtype)
        else:
            facts = common(self.type, other.type)
            if facts is None:
                return slow(self, other)
            block = of_facts(self.dtype, facts)
        return tl.tensor(add_pointer(None, self.handle, other.handle), block)

    return fast


def swapped(slow: Operator, operation: Any) -> Operator:
    """The operator of a number and a tensor."""
    return combined(slow, lambda left, right: operation(right, left), frozenset(), SIGNED | FLOATS)


COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
ARITHMETIC = {"__sub__": np.subtract, "__mul__": np.multiply}
SWAPPED = {"__radd__": np.add, "__rsub__": np.subtract, "__rmul__": np.multiply}
BITWISE = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}
SHIFTS = {"__lshift__": operator.lshift, "__rshift__": operator.rshift}


def fast_operators(tensor: Any) -> dict[str, Operator]:
    """Name of a method of tensors -> what replaces it."""
    slow = {name: getattr(tensor, name) for name in ("__add__", *ARITHMETIC, *SWAPPED, *BITWISE, *SHIFTS)}
    slow |= {name: getattr(tensor, name) for name in COMPARISONS}
    numeric = SIGNED | FLOATS
    made = {name: combined(slow[name], op, numeric, numeric) for name, op in ARITHMETIC.items()}
    made |= {name: swapped(slow[name], op) for name, op in SWAPPED.items()}
    made |= {name: combined(slow[name], op, BITS, WHOLE) for name, op in BITWISE.items()}
    made |= {name: combined(slow[name], op, frozenset(), WHOLE) for name, op in SHIFTS.items()}
    made |= {name: combined(slow[name], op, numeric, numeric, True) for name, op in COMPARISONS.items()}
    of_numbers = combined(slow["__add__"], np.add, numeric, numeric)
    made["__getitem__"], made["to"] = indexed(tensor.__getitem__), converted(tensor.to)
    return {**made, "__add__": sum_or_pointer(slow["__add__"], of_numbers)}
