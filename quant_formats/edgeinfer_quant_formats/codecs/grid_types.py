"""Decodes the IQ types whose levels are rows of a grid: IQ1_S to IQ3_S.

weight = unit · d · (2·s + 1) · level, with a scale s of 3 or 4 bits for 16 or 32 weights. A level is a
magnitude of the grid with a sign bit; in IQ1 it is 8 times a number of the grid plus or minus 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import field_bytes, read_f16
from edgeinfer_quant_formats.formats import FormatSpec
from edgeinfer_quant_formats.grids import GRIDS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Integers = NDArray[np.unsignedinteger[Any]]

_SEVEN_BITS = np.arange(128, dtype=np.uint8)
_PARITY = np.unpackbits(_SEVEN_BITS[:, None], axis=1).sum(axis=1, dtype=np.uint8) & np.uint8(1)
SIGNS = _SEVEN_BITS | (_PARITY << np.uint8(7))
"""Eight sign bits of each code of seven: the eighth makes the number of signs even."""


@dataclass(frozen=True, slots=True)
class _Codes:
    """Of n blocks: the rows of the grid, (n, rows); the scales s, (n, sub-blocks); the sign bits, (n, bits),
    each of as many weights as fill the block.
    """

    rows: Integers
    scales: Integers
    signs: Bytes


def _words(spec: FormatSpec, blocks: Bytes, name: str, nbytes: int) -> Integers:
    """The little-endian words of a field."""
    words: Integers = np.ascontiguousarray(field_bytes(spec, blocks, name)).view(f"<u{nbytes}")
    return words


def _parts(words: Integers, bits: int, count: int, mask: int) -> Integers:
    """The `count` fields of each word, lowest first, (n, words) -> (n, words·count)."""
    kind = words.dtype.type
    shifts = np.arange(0, bits * count, bits).astype(words.dtype)
    parts: Integers = ((words[:, :, None] >> shifts) & kind(mask)).reshape(len(words), -1)
    return parts


def _sign_bits(signs: Bytes) -> Bytes:
    return np.unpackbits(signs, axis=1, bitorder="little")


def _iq2_xxs(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """Of 32 weights four bytes of rows, and a word of four sign codes and the scale."""
    words = _words(spec, blocks, "qs", 4).reshape(len(blocks), 8, 2)
    rows, packed = np.ascontiguousarray(words[..., 0]).view(np.uint8), words[..., 1]
    return _Codes(rows, packed >> np.uint32(28), _sign_bits(SIGNS[_parts(packed, 7, 4, 127)]))


def _iq2_xs(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """9 bits of a row and 7 of its signs; the scale of 16 weights in a nibble."""
    words = _words(spec, blocks, "qs", 2)
    scales = _parts(field_bytes(spec, blocks, "scales"), 4, 2, 15)
    return _Codes(words & np.uint16(511), scales, _sign_bits(SIGNS[words >> np.uint16(9)]))


def _upper(spec: FormatSpec, blocks: Bytes, bits: int) -> Integers:
    """Rows of the grid: bytes of `qs`, with upper bits from `qh`."""
    high = _parts(field_bytes(spec, blocks, "qh"), bits, 8 // bits, (1 << bits) - 1).astype(np.uint16)
    rows: Integers = field_bytes(spec, blocks, "qs") | (high << np.uint16(8))
    return rows


def _iq2_s(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """10 bits of a row; plain sign bits; the scale of 16 weights in a nibble."""
    scales = _parts(field_bytes(spec, blocks, "scales"), 4, 2, 15)
    return _Codes(_upper(spec, blocks, 2), scales, _sign_bits(field_bytes(spec, blocks, "signs")))


def _iq3_xxs(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """A byte of a row of four weights; of 32 weights a word of four sign codes and the scale."""
    packed = _words(spec, blocks, "scales", 4)
    signs = _sign_bits(SIGNS[_parts(packed, 7, 4, 127)])
    return _Codes(field_bytes(spec, blocks, "qs"), packed >> np.uint32(28), signs)


def _iq3_s(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """9 bits of a row of four weights; plain sign bits; the scale of 32 weights in a nibble."""
    scales = _parts(field_bytes(spec, blocks, "scales"), 4, 2, 15)
    return _Codes(_upper(spec, blocks, 1), scales, _sign_bits(field_bytes(spec, blocks, "signs")))


def _iq1_s(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """Of 32 weights 16 bits: three upper bits of each of four rows, the scale of 3 bits, a sign."""
    words = _words(spec, blocks, "qh", 2)
    rows = field_bytes(spec, blocks, "qs") | (_parts(words, 3, 4, 7) << np.uint16(8))
    signs = (words >> np.uint16(15)).astype(np.uint8)
    return _Codes(rows, (words >> np.uint16(12)) & np.uint16(7), signs)


def _iq1_m(spec: FormatSpec, blocks: Bytes) -> _Codes:
    """Of a row a nibble: three upper bits and a sign; the scales of 16 weights in 3 bits."""
    high = _parts(field_bytes(spec, blocks, "qh"), 4, 2, 15).astype(np.uint16)
    rows = field_bytes(spec, blocks, "qs") | ((high & np.uint16(7)) << np.uint16(8))
    scales = _parts(_words(spec, blocks, "scales", 2), 3, 4, 7)
    return _Codes(rows, scales, (high >> np.uint16(3)).astype(np.uint8))


def _factor(spec: FormatSpec, blocks: Bytes) -> Floats:
    """The float16 scale of a block, (n, 1)."""
    if spec.name != "IQ1_M":
        return read_f16(field_bytes(spec, blocks, "d"))
    nibbles = _words(spec, blocks, "scales", 2) >> np.uint16(12)
    bits = np.bitwise_or.reduce(nibbles << np.arange(0, 16, 4, dtype=np.uint16), axis=1, keepdims=True)
    return read_f16(bits.astype("<u2").view(np.uint8))


_CODES: Mapping[str, Callable[[FormatSpec, Bytes], _Codes]] = MappingProxyType(
    {
        "IQ2_XXS": _iq2_xxs,
        "IQ2_XS": _iq2_xs,
        "IQ2_S": _iq2_s,
        "IQ3_XXS": _iq3_xxs,
        "IQ3_S": _iq3_s,
        "IQ1_S": _iq1_s,
        "IQ1_M": _iq1_m,
    }
)


def decode_grid_blocks(spec: FormatSpec, blocks: Bytes) -> Floats:
    """Blocks (n, bytes of a block) as (n, 256)."""
    codes, grid = _CODES[spec.name](spec, blocks), GRIDS[spec.grid]
    levels = grid.rows[codes.rows].reshape(*codes.signs.shape, -1)
    sign = np.int8(1) - np.int8(2) * codes.signs.view(np.int8)[:, :, None]
    levels = np.int8(8) * levels + sign if min(grid.values) < 0 else levels * sign
    steps = (np.float32(2) * codes.scales.astype(np.float32) + np.float32(1)) * np.float32(spec.unit)
    scales = _factor(spec, blocks) * steps
    weights = levels.reshape(*scales.shape, -1).astype(np.float32)
    weights *= scales[:, :, None]
    return weights.reshape(len(blocks), -1)
