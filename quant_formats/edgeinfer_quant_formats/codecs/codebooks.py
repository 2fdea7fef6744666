"""Blocks with 4-bit quants that index a non-uniform table: IQ4_NL, IQ4_XS, MXFP4."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import half_bytes, pack_fields, read_half, unpack_fields
from edgeinfer_quant_formats.codecs.scale_search import IntegerGrid, reciprocal, search_scale
from edgeinfer_quant_formats.codecs.super_blocks import as_columns, error_weights, fit_scales, to_half

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# The 16 levels of IQ4_NL and IQ4_XS (ggml's `kvalues_iq4nl`), closer together near zero.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Twice the values of FP4 (E2M1; OCP Microscaling Formats v1.0, table 5): the block's scale is halved.
FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def decode_iq4_nl(blocks: Bytes) -> Floats:
    """IQ4_NL: `half d; uint8 qs[16]`; weight = d·IQ4_LEVELS[q]."""
    return read_half(blocks[:, :2]) * IQ4_LEVELS[unpack_fields(blocks[:, 2:], 4, 16)]


def unpack_iq4_xs_scales(blocks: Bytes) -> NDArray[np.int8]:
    """Eight 6-bit scales less 32, (n, 8): low nibbles in bytes 4-7, upper two bits in bytes 2-3."""
    low = np.empty((len(blocks), 8), np.uint8)
    low[:, ::2] = blocks[:, 4:8] & np.uint8(15)
    low[:, 1::2] = blocks[:, 4:8] >> np.uint8(4)
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low |= ((upper & np.uint16(3)) << np.uint16(4)).astype(np.uint8)
    scales: NDArray[np.int8] = low.view(np.int8) - np.int8(32)
    return scales


def decode_iq4_xs(blocks: Bytes) -> Floats:
    """IQ4_XS: `half d; uint16 scales_h; uint8 scales_l[4]; uint8 qs[128]`.

    8 sub-blocks of 32; weight = d·scale·IQ4_LEVELS[q].
    """
    steps = read_half(blocks[:, :2]) * unpack_iq4_xs_scales(blocks).astype(np.float32)
    levels = IQ4_LEVELS[unpack_fields(blocks[:, 8:], 4, 16)].reshape(-1, 8, 32)
    return (steps[:, :, None] * levels).reshape(len(blocks), 256)


def half_of_power(exponents: Bytes) -> Floats:
    """E8M0 exponents as float32, halved: 2^(e - 128); the two smallest are subnormal."""
    wide = exponents.astype(np.uint32)
    subnormal = np.uint32(0x00200000) << np.minimum(wide, np.uint32(1))
    bits = np.where(wide < 2, subnormal, (wide - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def decode_mxfp4(blocks: Bytes) -> Floats:
    """MXFP4: `uint8 e; uint8 qs[16]`; weight = 2^(e - 128)·FP4_LEVELS[q]."""
    return half_of_power(blocks[:, :1]) * FP4_LEVELS[unpack_fields(blocks[:, 1:], 4, 16)]


class IQ4Grid:
    """The IQ4 levels, with a lookup table at quarter steps between them."""

    _QUARTERS = np.arange(-512, 512, dtype=np.float32) / np.float32(4)
    INDICES = np.abs(_QUARTERS[:, None] - IQ4_LEVELS).argmin(axis=1).astype(np.uint8)
    _NEAREST = IQ4_LEVELS[INDICES]

    def nearest(self, values: Floats, inverse: Floats, out: Floats) -> Floats:
        """The levels nearest to values·inverse, written to `out`."""
        np.multiply(values, inverse * np.float32(4), out=out)
        np.add(out, np.float32(512.5), out=out)
        np.clip(out, np.float32(0), np.float32(1023), out=out)
        return np.take(self._NEAREST, out.astype(np.int32), out=out, mode="clip")


IQ4_TARGETS = (-133, -130, -127, -124, -121, -118, 107, 110, 113, 116)


def _iq4_quants(levels: Floats) -> Bytes:
    """The index of each level, (n, k)."""
    quants: Bytes = IQ4Grid.INDICES[(levels * np.float32(4)).astype(np.int32) + 512]
    return quants


def encode_iq4_nl(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to IQ4_NL (n, 18)."""
    grid, values = IQ4Grid(), as_columns(blocks, 32)
    weights = as_columns(error_weights(blocks, importance), 32)
    d = to_half(search_scale(values, weights, grid, IQ4_TARGETS))
    levels = grid.nearest(values, reciprocal(d), out=np.empty_like(values))
    return np.hstack((half_bytes(d[:, None]), pack_fields(_iq4_quants(levels.T), 4, 16)))


def encode_iq4_xs(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to IQ4_XS (n, 136)."""
    weights = error_weights(blocks, importance)
    fit = fit_scales(blocks, weights, 32, IQ4Grid(), IntegerGrid(-32, 31), IQ4_TARGETS)
    scales = (fit.scales + np.float32(32)).astype(np.uint8)
    low = (scales[:, ::2] & np.uint8(15)) | ((scales[:, 1::2] & np.uint8(15)) << np.uint8(4))
    shifted = (scales >> np.uint8(4)).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    high = np.bitwise_or.reduce(shifted, axis=1, keepdims=True).astype("<u2").view(np.uint8)
    return np.hstack((half_bytes(fit.d[:, None]), high, low, pack_fields(_iq4_quants(fit.levels), 4, 16)))


# Midpoints between the FP4 levels, for |weight| / scale; a tie goes to the smaller level.
_FP4_MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


def encode_mxfp4(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to MXFP4 (n, 17): the largest weight sets the power of two; importance is not used."""
    magnitudes = np.abs(blocks)
    largest = magnitudes.max(axis=1, keepdims=True)
    powers = np.floor(np.log2(largest)) + np.float32(125)
    exponents = np.where(largest > 0, np.maximum(powers, 0), 0).astype(np.uint8)
    magnitudes /= half_of_power(exponents)
    quants = np.zeros(blocks.shape, np.uint8)
    for midpoint in _FP4_MIDPOINTS:
        quants += magnitudes > np.float32(midpoint)
    quants[(blocks < 0) & (quants > 0)] += np.uint8(8)
    return np.hstack((exponents, pack_fields(quants, 4, 16)))


ENCODERS = {"IQ4_NL": encode_iq4_nl, "IQ4_XS": encode_iq4_xs, "MXFP4": encode_mxfp4}
DECODERS = {"IQ4_NL": decode_iq4_nl, "IQ4_XS": decode_iq4_xs, "MXFP4": decode_mxfp4}
