"""Encodes metadata values: the GGUF type of a Python value, and its bytes."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.gguf.value_types import SCALAR_DTYPES, ValueType

_INTEGER_RANGES = (
    (ValueType.UINT32, 0, 2**32 - 1),
    (ValueType.INT32, -(2**31), 2**31 - 1),
    (ValueType.UINT64, 0, 2**64 - 1),
    (ValueType.INT64, -(2**63), 2**63 - 1),
)
# Arrays of small integers are INT32 in common files (token types, section lengths).
_ARRAY_RANGES = (_INTEGER_RANGES[1], _INTEGER_RANGES[0], _INTEGER_RANGES[3], _INTEGER_RANGES[2])
_TYPE_OF_DTYPE = {dtype.newbyteorder("="): kind for kind, dtype in SCALAR_DTYPES.items()}


def encode_text(text: str) -> bytes:
    """A length and the text in UTF-8, as in GGUF strings."""
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Any) -> bytes:
    """The type and the bytes of a metadata value.

    bool, str and numpy scalars keep their type. An int gets the first of uint32, int32, uint64, int64 that
    fits; a float gets float32. Lists and one-dimensional numpy arrays likewise.

    Raises:
        FormatError: a value that GGUF can't hold.
    """
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + encode_text(value)
    if isinstance(value, np.ndarray) or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        return _encode_array(value)
    kind, scalar = _scalar(value)
    return struct.pack("<I", kind) + scalar.tobytes()


def _scalar(value: Any) -> tuple[ValueType, NDArray[Any]]:
    if isinstance(value, np.generic):
        kind = _TYPE_OF_DTYPE.get(value.dtype.newbyteorder("="))
    elif isinstance(value, bool):
        kind = ValueType.BOOL
    elif isinstance(value, int):
        kind = _integer_type(value, value, _INTEGER_RANGES)
    elif isinstance(value, float):
        kind = ValueType.FLOAT32
    else:
        kind = None
    if kind is None:
        raise FormatError(f"{type(value).__name__} {printable(value)}, wanted a bool, number, string or list")
    with np.errstate(over="ignore"):
        return kind, np.asarray(value, SCALAR_DTYPES[kind])


def _integer_type(lowest: int, highest: int, ranges: Sequence[tuple[ValueType, int, int]]) -> ValueType:
    for kind, minimum, maximum in ranges:
        if minimum <= lowest and highest <= maximum:
            return kind
    raise FormatError(f"integers from {lowest} to {highest}, wanted them to fit 64 bits")


def _encode_array(values: Any) -> bytes:
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise FormatError(f"array of shape {values.shape}, wanted one dimension")
        if values.dtype.kind not in "UT":
            return _encode_numbers(values)
        values = values.tolist()
    if all(isinstance(value, str) for value in values):
        head = struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(values))
        return head + b"".join(encode_text(value) for value in values)
    return _encode_numbers(_number_array(values))


def _number_array(values: Sequence[Any]) -> Any:
    if all(isinstance(value, bool | np.bool_) for value in values):
        return np.asarray(values, bool)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        kind = _integer_type(min(values), max(values), _ARRAY_RANGES)
        return np.asarray(values, SCALAR_DTYPES[kind])
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float32)
    array = np.asarray(values) if all(isinstance(value, np.generic) for value in values) else None
    if array is None or array.ndim != 1:
        kinds = sorted({type(value).__name__ for value in values})
        raise FormatError(f"list of {', '.join(kinds)}, wanted strings, bools or numbers of one kind")
    return array


def _encode_numbers(values: NDArray[Any]) -> bytes:
    kind = _TYPE_OF_DTYPE.get(values.dtype.newbyteorder("="))
    if kind is None:
        raise FormatError(f"array of {values.dtype}, wanted bools, integers, float32 or float64")
    return (
        struct.pack("<IIQ", ValueType.ARRAY, kind, values.size) + values.astype(SCALAR_DTYPES[kind]).tobytes()
    )
