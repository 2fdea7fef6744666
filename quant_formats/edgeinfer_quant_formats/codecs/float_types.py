"""Unquantized types: floats of 16, 32 and 64 bits, and the integers that some tensors hold."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def decode_bf16(blocks: Bytes) -> Floats:
    """BF16: `uint16 bits`, the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decoder(dtype: str) -> Callable[[Bytes], Floats]:
    def decode_numbers(blocks: Bytes) -> Floats:
        return blocks.view(dtype).astype(np.float32)

    return decode_numbers


def encode_bf16(values: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 1) to BF16 (n, 2), rounded to nearest even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    not_a_number = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    quiet = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x00400000)
    return (np.where(not_a_number, quiet, rounded) >> np.uint32(16)).astype("<u2").view(np.uint8)


def _encoder(dtype: str) -> Callable[[Floats, Floats | None], Bytes]:
    def encode_numbers(values: Floats, importance: Floats | None) -> Bytes:
        return np.ascontiguousarray(values, dtype).view(np.uint8)

    return encode_numbers


ENCODERS = {"F32": _encoder("<f4"), "F16": _encoder("<f2"), "BF16": encode_bf16}
DECODERS = {
    "F32": _decoder("<f4"),
    "F16": _decoder("<f2"),
    "BF16": decode_bf16,
    "F64": _decoder("<f8"),
    "I8": _decoder("i1"),
    "I16": _decoder("<i2"),
    "I32": _decoder("<i4"),
    "I64": _decoder("<i8"),
}
