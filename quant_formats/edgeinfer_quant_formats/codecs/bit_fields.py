"""Packs and unpacks fields of 1, 2 and 4 bits in bytes, in the order of the block formats."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError

Bytes = NDArray[np.uint8]


def unpack_fields(packed: Bytes, bits: int, group: int) -> Bytes:
    """Split each byte into fields of `bits`, lowest first, (n, bytes) -> (n, bytes·8/bits).

    Every `group` bytes give their lowest fields in order, then the next fields, and so on. ggml uses this
    order so that one vector shift yields consecutive quants.
    """
    fields = 8 // bits
    source = packed.reshape(len(packed), -1, group)
    out = np.empty((len(packed), source.shape[1], fields, group), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for field in range(fields):
        np.right_shift(source, np.uint8(field * bits), out=out[:, :, field])
        if field < fields - 1:
            out[:, :, field] &= mask
    return out.reshape(len(packed), -1)


def pack_fields(values: Bytes, bits: int, group: int) -> Bytes:
    """The inverse of `unpack_fields`, (n, fields) -> (n, fields·bits/8); values must fit `bits`."""
    fields = 8 // bits
    source = values.reshape(len(values), -1, fields, group)
    out = source[:, :, 0].copy()
    for field in range(1, fields):
        out |= source[:, :, field] << np.uint8(field * bits)
    return out.reshape(len(values), -1)


def read_half(field: Bytes) -> NDArray[np.float32]:
    """float16 fields of a block, (n, 2·k) bytes -> (n, k) float32."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def half_bytes(values: NDArray[np.float32]) -> Bytes:
    """The inverse of `read_half`: (n, k) float32 -> (n, 2·k) bytes, rounded to float16.

    Raises:
        FormatError: a value beyond float16, which would make a whole block infinite.
    """
    halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        largest = np.abs(values).max()
        raise FormatError(f"block scale {largest:g} does not fit float16, wanted at most 65504")
    return halves.view(np.uint8)
