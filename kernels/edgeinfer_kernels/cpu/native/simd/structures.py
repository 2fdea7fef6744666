"""Typed fields of structures in compiled code: `args.tokens` loads a field, `args.tokens = 1` stores it.

A numba value of `StructureView` is the address of a structure, which the compiled code passes as an int64:

- `StepArgs(address)` is the structure at an address, and `args.address` its address;
- `args.field` is an int64, a float32, the structure whose address the field holds, or, for an array within
  the structure, the address of the array or its first structure;
- `args[i]` is the i-th of consecutive structures.
"""

import ctypes
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import (
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
    type_callable,
)

from edgeinfer_kernels.cpu.native.simd.lanes import F32, I64, load, store
from edgeinfer_kernels.cpu.runtime import block_args, disk_args, experts_args, kernel_args, recurrent_args
from edgeinfer_kernels.cpu.runtime.structure import Structure, field_types, is_address, offset_of

NO_WRAP = ["nsw"]
"""As numba's own integer arithmetic; without it, LLVM finds fewer simplifications."""


class StructureView(types.Type):
    """The numba type of the address of a structure."""

    def __init__(self, structure: type[Structure]) -> None:
        self.structure = structure
        self.fields = field_types(structure)
        super().__init__(name=structure.__name__)


@register_model(StructureView)
class StructureViewModel(models.PrimitiveModel):
    """A view is passed as the address alone."""

    def __init__(self, manager: Any, view: StructureView) -> None:
        super().__init__(manager, view, I64)


def numba_type(kind: Any) -> Any:
    """The numba type of the value of a field, an argument or a result."""
    if kind in (int, ctypes.c_int64):
        return types.int64
    if kind is ctypes.c_float:
        return types.float32
    if is_address(kind):
        return StructureView(kind)
    return StructureView(kind._type_) if is_address(kind._type_) else types.int64


@infer_getattr
class FieldTypes(AttributeTemplate):
    """Types of `args.field` and of `args.address`."""

    key = StructureView

    def generic_resolve(self, view, name):
        return types.int64 if name == "address" else numba_type(view.fields[name])


def _offset(builder: Any, address: Any, nbytes: Any) -> Any:
    return builder.add(address, nbytes, flags=NO_WRAP)


def _at(builder: Any, view: StructureView, address: Any, name: str) -> Any:
    return _offset(builder, address, ir.Constant(I64, offset_of(view.structure, name)))


@lower_getattr_generic(StructureView)
def load_field(context, builder, view, address, name):
    """A field, or the address of an array."""
    if name == "address":
        return address
    at, kind = _at(builder, view, address, name), view.fields[name]
    if issubclass(kind, ctypes.Array):
        return at
    return load(builder, at, F32 if kind is ctypes.c_float else I64)


@lower_setattr_generic(StructureView)
def store_field(context, builder, signature, values, name):
    """Store a field."""
    (address, value), (view, stored) = values, signature.args
    value = context.cast(builder, value, stored, numba_type(view.fields[name]))
    store(builder, value, _at(builder, view, address, name))


@infer_global(operator.getitem)
class ItemTypes(AbstractTemplate):
    """Type of `args[i]`."""

    def generic(self, args, kws):
        view, index = args
        if isinstance(view, StructureView) and isinstance(index, types.Integer):
            return signature(view, view, types.int64)
        return None


@lower_builtin(operator.getitem, StructureView, types.Integer)
def structure_at(context, builder, signature, values):
    """The address of one of consecutive structures."""
    address, index = values
    nbytes = ctypes.sizeof(signature.args[0].structure)
    return _offset(builder, address, builder.mul(index, ir.Constant(I64, nbytes), flags=NO_WRAP))


def _make_callable(structure: type[Structure]) -> None:
    """Let compiled code call the structure with an address."""

    @type_callable(structure)
    def type_call(context):
        return lambda address: StructureView(structure) if isinstance(address, types.Integer) else None

    @lower_builtin(structure, types.Integer)
    def from_address(context, builder, signature, values):
        return context.cast(builder, values[0], signature.args[0], types.int64)


for _module in (kernel_args, block_args, disk_args, experts_args, recurrent_args):
    for _found in list(vars(_module).values()):
        if isinstance(_found, type) and issubclass(_found, Structure) and _found is not Structure:
            _make_callable(_found)
