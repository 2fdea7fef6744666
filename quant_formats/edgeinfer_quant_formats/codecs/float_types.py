"""Plain numbers: floats of 16, 32 and 64 bits, and the integers that some tensors hold."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def decode_bf16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """BF16: `uint16 bits`, the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decoder(dtype: str) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    def decode_numbers(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        return blocks.view(dtype).astype(np.float32)

    return decode_numbers


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
