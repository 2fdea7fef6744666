"""The value types of GGUF metadata, with their numbers in files."""

from enum import IntEnum
from typing import Any

import numpy as np


class ValueType(IntEnum):
    """`enum gguf_type` of the GGUF specification."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

MAGIC = b"GGUF"
POWERINFER_MAGIC = b"PWRI"
"""Of a file of PowerInfer with predictors, which is a GGUF file otherwise."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
