"""Packs and unpacks the codes of blocks, in the bit order that their `FormatSpec` gives."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.formats import FormatSpec

Bytes = NDArray[np.uint8]


def unpack_fields(packed: Bytes, bits: int, group: int) -> Bytes:
    """Split each byte into fields of `bits`, lowest first, (n, bytes) -> (n, bytes·8/bits).

    Every `group` bytes give their lowest fields in order, then the next fields, and so on. ggml uses this
    order so that one vector shift yields consecutive quants.
    """
    if bits == 8:
        return packed
    if bits == group == 1:
        return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
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
    if bits == 8:
        return values
    if bits == group == 1:
        return np.packbits(values, axis=1, bitorder="little")
    fields = 8 // bits
    source = values.reshape(len(values), -1, fields, group)
    out = source[:, :, 0].copy()
    for field in range(1, fields):
        out |= source[:, :, field] << np.uint8(field * bits)
    return out.reshape(len(values), -1)


def field_bytes(spec: FormatSpec, blocks: Bytes, name: str) -> Bytes:
    """The bytes of a field in blocks (n, bytes of a block), (n, bytes of the field)."""
    field = spec.field(name)
    return blocks[:, field.offset : field.end]


def unpack_codes(spec: FormatSpec, blocks: Bytes) -> Bytes:
    """The codes of blocks (n, bytes of a block), (n, weights of a block)."""
    lowest, *upper = spec.codes
    codes = unpack_fields(field_bytes(spec, blocks, lowest.field), lowest.bits, lowest.group)
    for part in upper:
        bits = unpack_fields(field_bytes(spec, blocks, part.field), part.bits, part.group)
        bits <<= np.uint8(part.shift)
        codes |= bits
    return codes


def pack_blocks(spec: FormatSpec, codes: Bytes, **fields: Bytes) -> Bytes:
    """Blocks (n, bytes of a block) from codes (n, weights of a block) and the bytes of all other fields."""
    for part in spec.codes:
        low = (codes >> np.uint8(part.shift)) & np.uint8((1 << part.bits) - 1)
        fields[part.field] = pack_fields(low, part.bits, part.group)
    return join_fields(spec, fields)


def join_fields(spec: FormatSpec, fields: Mapping[str, Bytes]) -> Bytes:
    """Blocks (n, bytes of a block) from the bytes of all fields."""
    return np.hstack([fields[field.name] for field in spec.fields])


def read_f16(field: Bytes) -> NDArray[np.float32]:
    """float16 fields of a block, (n, 2·k) bytes -> (n, k) float32."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def f16_bytes(values: NDArray[np.float32]) -> Bytes:
    """The inverse of `read_f16`: (n, k) float32 -> (n, 2·k) bytes, rounded to float16.

    Raises:
        FormatError: a value beyond float16, which would make a whole block infinite.
    """
    halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        largest = np.abs(values).max()
        raise FormatError(f"block scale {largest:g} does not fit float16, wanted at most 65504")
    return halves.view(np.uint8)
