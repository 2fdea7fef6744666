"""Structures that Python fills and compiled code reads: one class gives both their fields.

A structure is a `ctypes.Structure`, so Python reads and writes fields as attributes. Compiled code reads the
same offsets and types (`native/simd/structures.py`). This module does not need numba, so a warm start does
not import numba.
"""

import ctypes
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

Int = Annotated[int, ctypes.c_int64]
"""A count, a flag, a code, or the address of an array."""
Float = Annotated[float, ctypes.c_float]
Word = Annotated[Any, ctypes.c_int64 * 1]
"""An int64 that several threads change; compiled code gets its address."""


class Structure(ctypes.Structure):
    """Base of all structures; fields that are not given are 0.

    The annotation of a field is `Annotated[…, its type]`: one of the above; another structure, for the
    address of one or several of these; or an array within the structure.
    """

    def __init__(self, *fields: float, **values: float) -> None:
        unknown = values.keys() - field_types(type(self)).keys()
        if unknown:
            expected = ", ".join(field_types(type(self)))
            raise TypeError(f"{type(self).__name__}: saw the field {min(unknown)}, wanted {expected}")
        super().__init__(*fields, **values)


Declared = TypeVar("Declared", bound=Structure)


def structure(pitch: int = 8) -> Callable[[type[Declared]], type[Declared]]:
    """A decorator that lays out the annotated fields of a structure, each at a multiple of `pitch` bytes."""

    def lay_out(declared: type[Declared]) -> type[Declared]:
        fields: list[tuple[str, Any]] = []
        for name, kind in field_types(declared).items():
            stored = ctypes.c_int64 if is_address(kind) else kind
            padding = -ctypes.sizeof(stored) % pitch
            fields += [(name, stored), *([(f"after_{name}", ctypes.c_byte * padding)] if padding else [])]
        declared._fields_ = fields
        return declared

    return lay_out


def field_types(declared: type[Structure]) -> dict[str, Any]:
    """Field name -> its type in the annotation."""
    return {name: hint.__metadata__[0] for name, hint in declared.__annotations__.items()}


def offset_of(declared: type[Structure], name: str) -> int:
    """Offset of a field in bytes."""
    return int(getattr(declared, name).offset)


def is_address(kind: Any) -> bool:
    """Whether a field of this type holds the address of a structure."""
    return issubclass(kind, Structure)
