"""Decodes blocks of every quantized format to float32, from the facts of its `FormatSpec`."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import field_bytes, read_f16, unpack_codes, unpack_fields
from edgeinfer_quant_formats.codecs.grid_types import decode_grid_blocks
from edgeinfer_quant_formats.codecs.ternary import unpack_base_three
from edgeinfer_quant_formats.formats import FORMATS, FormatSpec, SubScales

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
LEVELS = {spec.name: np.array(spec.levels, np.float32) for spec in FORMATS.values() if spec.levels}


def decode_blocks(spec: FormatSpec, blocks: Bytes) -> Floats:
    """Blocks (n, bytes of a block) as (n, weights of a block)."""
    if spec.grid:
        return decode_grid_blocks(spec, blocks)
    scales, minima = _scales_and_minima(spec, blocks)
    weights = _levels(spec, blocks).reshape(*scales.shape, -1)
    weights *= scales[:, :, None]
    if minima is not None:
        weights -= minima[:, :, None]
    return weights.reshape(len(blocks), -1)


def _levels(spec: FormatSpec, blocks: Bytes) -> Floats:
    """The level of every code, (n, weights of a block)."""
    codes = unpack_codes(spec, blocks) if spec.codes else unpack_base_three(spec, blocks)
    if spec.levels:
        return LEVELS[spec.name][codes]
    signed = codes.view(np.int8)
    if spec.step > 1:
        signed = signed * np.int8(spec.step)
    if spec.offset:
        signed = signed - np.int8(spec.offset)
    return (signed if spec.signed or spec.offset else codes).astype(np.float32)


def _scales_and_minima(spec: FormatSpec, blocks: Bytes) -> tuple[Floats, Floats | None]:
    """Scales of sub-blocks, (n, sub-blocks), and what is subtracted from their weights, if anything."""
    if spec.fields[0].dtype == "e8m0":
        return f16_of_power(blocks[:, :1]), None
    if spec.fields[0].dtype == "e4m3":
        return half_of_e4m3(field_bytes(spec, blocks, "d")), None
    d = read_f16(field_bytes(spec, blocks, "d"))
    if spec.sub_scales is None:
        return d, -read_f16(field_bytes(spec, blocks, "m")) if spec.has_minimum else None
    scales, minima = SCALE_UNPACKERS[spec.sub_scales](spec, blocks)
    steps = d * scales.astype(np.float32)
    if minima is None:
        return steps, None
    return steps, read_f16(field_bytes(spec, blocks, "dmin")) * minima.astype(np.float32)


def f16_of_power(exponents: Bytes) -> Floats:
    """E8M0 exponents as float32, halved: 2^(e - 128); the two smallest are subnormal."""
    wide = exponents.astype(np.uint32)
    subnormal = np.uint32(0x00200000) << np.minimum(wide, np.uint32(1))
    bits = np.where(wide < 2, subnormal, (wide - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def half_of_e4m3(bits: Bytes) -> Floats:
    """E4M3 numbers without a sign as float32, halved; 127 is 0."""
    exponent = ((bits >> np.uint8(3)) & np.uint8(15)).astype(np.int32)
    mantissa = (bits & np.uint8(7)).astype(np.float32)
    hidden_bit = np.where(exponent > 0, np.float32(8), np.float32(0))
    numbers = np.ldexp(mantissa + hidden_bit, np.maximum(exponent, 1) - 11)
    return np.where(bits == 127, np.float32(0), numbers).astype(np.float32)


def unpack_scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from (n, 12) bytes, as in Q4_K and Q5_K.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, bytes 8-11 the low nibbles of scales 4-7 and minima 4-7;
    their upper two bits are the upper bits of bytes 0-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, four, two = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)
    late_scales = (third & four) | ((first >> np.uint8(2)) & two)
    late_minima = (third >> np.uint8(4)) | ((second >> np.uint8(2)) & two)
    return np.hstack((first & six, late_scales)), np.hstack((second & six, late_minima))


Scales = NDArray[np.uint8] | NDArray[np.int8]


def _six_bits_and_minima(spec: FormatSpec, blocks: Bytes) -> tuple[Scales, Scales | None]:
    return unpack_scales_and_minima(field_bytes(spec, blocks, "scales"))


def _nibbles_and_minima(spec: FormatSpec, blocks: Bytes) -> tuple[Scales, Scales | None]:
    pairs = field_bytes(spec, blocks, "scales")
    return pairs & np.uint8(15), pairs >> np.uint8(4)


def _six_bits(spec: FormatSpec, blocks: Bytes) -> tuple[Scales, Scales | None]:
    """The four low bits of sixteen scales in 8 bytes, the two high bits in 4."""
    packed = field_bytes(spec, blocks, "scales")
    low = unpack_fields(packed[:, :8], 4, 8)
    high = unpack_fields(packed[:, 8:], 2, 4)
    return (low | (high << np.uint8(4))).view(np.int8) - np.int8(32), None


def _bytes(spec: FormatSpec, blocks: Bytes) -> tuple[Scales, Scales | None]:
    return field_bytes(spec, blocks, "scales").view(np.int8), None


def _split_six_bits(spec: FormatSpec, blocks: Bytes) -> tuple[Scales, Scales | None]:
    packed = field_bytes(spec, blocks, "scales_l")
    low = np.empty((len(blocks), 8), np.uint8)
    low[:, ::2] = packed & np.uint8(15)
    low[:, 1::2] = packed >> np.uint8(4)
    upper = np.ascontiguousarray(field_bytes(spec, blocks, "scales_h")).view("<u2")
    upper = upper >> np.arange(0, 16, 2, dtype=np.uint16)
    low |= ((upper & np.uint16(3)) << np.uint16(4)).astype(np.uint8)
    return low.view(np.int8) - np.int8(32), None


SCALE_UNPACKERS: dict[SubScales, Callable[[FormatSpec, Bytes], tuple[Scales, Scales | None]]] = {
    SubScales.SIX_BITS_AND_MINIMA: _six_bits_and_minima,
    SubScales.NIBBLES_AND_MINIMA: _nibbles_and_minima,
    SubScales.SIX_BITS: _six_bits,
    SubScales.BYTES: _bytes,
    SubScales.SPLIT_SIX_BITS: _split_six_bits,
}
