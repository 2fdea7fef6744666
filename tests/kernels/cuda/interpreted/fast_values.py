"""Loads, indices and casts of Triton's tensors for the usual operands, without the checks of a compiler."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted.recorded_arrays import Recorded

WHOLE = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
SAME_BITS = WHOLE | {"fp16", "fp32", "fp64"}
"""Types whose numbers numpy has too."""
Method = Callable[..., Any]


def of_facts(element: Any, facts: Any) -> Any:
    """The block type of the elements, whose shape is known."""
    made = tl.block_type.__new__(tl.block_type)
    made.element_ty, made.facts = element, facts
    made.shape, made.numel = facts.sizes, facts.numel
    return made


def common_facts() -> Callable[[Any, Any], Any]:
    """(two types) -> the properties of their common shape, None if it is to be found the slow way."""
    known: dict[tuple[int, int], Any] = {}

    def common(left: Any, right: Any) -> Any:
        if not (isinstance(left, tl.block_type) and isinstance(right, tl.block_type)):
            return None
        key = id(left.facts), id(right.facts)
        if key not in known:
            sizes = [tuple(each.shape) for each in (left, right)]
            known[key] = None
            if len(sizes[0]) == len(sizes[1]):
                known[key] = tl.block_type(tl.int32, np.broadcast_shapes(*sizes)).facts
        return known[key]

    return common


def indexed(slow: Method) -> Method:
    """`block[:, None]` and the like."""
    known: dict[tuple[int, tuple[bool, ...]], Any] = {}
    whole = slice(None)

    def fast(self: Any, index: Any) -> Any:
        block, data = self.type, self.handle.data
        is_usual = isinstance(block, tl.block_type) and type(index) is tuple
        if not is_usual or data.ndim != len(block.shape) + 1:
            return slow(self, index)
        if any(each is not None and each != whole for each in index):
            return slow(self, index)
        key = id(block.facts), tuple([each is None for each in index])
        facts = known.get(key)
        if facts is None:
            result = slow(self, index)
            known[key] = result.type.facts
            return result
        handle = interpreter.TensorHandle(data[(whole, *index)], self.dtype)
        return tl.tensor(handle, of_facts(self.dtype, facts))

    return fast


def _is_direct(source: str, target: str, bitcast: bool) -> bool:
    """Whether numpy's cast is Triton's."""
    if bitcast:
        return {source, target} <= SAME_BITS
    from_whole = source in WHOLE and (target in WHOLE or target == "fp32")
    return from_whole or (source, target) in {("fp16", "fp32"), ("fp32", "fp16"), ("int1", "int32")}


def converted(slow: Method) -> Method:
    """`tensor.to(dtype)`."""

    def fast(self: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Any:
        source = self.dtype
        is_usual = type(dtype) is tl.dtype and type(source) is tl.dtype and type(bitcast) is bool
        if not is_usual or fp_downcast_rounding is not None or source.name == dtype.name:
            return slow(self, dtype, fp_downcast_rounding, bitcast)
        data, wanted = self.handle.data, interpreter._get_np_dtype(dtype)
        if not _is_direct(source.name, dtype.name, bitcast) or (bitcast and wanted.itemsize != data.itemsize):
            return slow(self, dtype, fp_downcast_rounding, bitcast)
        data = data.view(wanted) if bitcast else data.astype(wanted)
        block = self.type.with_element_ty(dtype) if isinstance(self.type, tl.block_type) else dtype
        return tl.tensor(interpreter.TensorHandle(data, dtype), block)

    return fast


def loaded(slow: Method) -> Method:
    """Replaces `TritonSemantic.load`: a fast path for all addresses, and for masks of their shape next to
    zeros.
    """
    arrays: dict[tuple[tuple[int, ...], str], Any] = {}

    def constant(shape: tuple[int, ...], element: Any) -> Any:
        key = shape, element.name
        if key not in arrays:
            make = np.ones if element is tl.int1 else np.zeros
            arrays[key] = make(shape, interpreter._get_np_dtype(element))
        return arrays[key]

    def fast(self: Any, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
        block, pointer, addresses = ptr.type, ptr.dtype, ptr.handle.data
        element = getattr(pointer, "element_ty", tl.int1)
        *blocks, _, _, is_volatile = options
        is_usual = isinstance(block, tl.block_type) and not any(blocks) and not is_volatile
        is_usual &= element.name != "int1"
        if is_usual and mask is None and other is None:
            which = constant(addresses.shape, tl.int1)
        elif is_usual and _is_zero(other) and mask is not None and mask.shape is ptr.shape:
            which = mask.handle.data
            if which.shape != addresses.shape:
                if which.ndim != addresses.ndim:
                    return slow(self, ptr, mask, other, *options)
                addresses, which = np.broadcast_arrays(addresses, which)
        else:
            return slow(self, ptr, mask, other, *options)
        missing = constant(addresses.shape, element)
        data = interpreter._interpreter.load(addresses, which, missing, missing.dtype)
        return tl.tensor(interpreter.TensorHandle(data, element), block.with_element_ty(element))

    return fast


def _is_zero(value: Any) -> bool:
    if value is None or type(value.handle.data) is Recorded:
        return False
    return bool(value.handle.data.size == 1 and value.handle.data.item() == 0)
