"""Encoders of formats with a codebook: IQ4_NL, IQ4_XS, MXFP4."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import f16_bytes, pack_blocks
from edgeinfer_quant_formats.codecs.decoding import LEVELS, f16_of_power
from edgeinfer_quant_formats.codecs.scale_search import IntegerGrid, reciprocal, search_scale
from edgeinfer_quant_formats.codecs.super_blocks import as_columns, error_weights, fit_scales, to_f16
from edgeinfer_quant_formats.formats import FORMATS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

IQ4_LEVELS = LEVELS["IQ4_NL"]


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


def _iq4_codes(levels: Floats) -> Bytes:
    """The index of each level, (n, k)."""
    quants: Bytes = IQ4Grid.INDICES[(levels * np.float32(4)).astype(np.int32) + 512]
    return quants


def encode_iq4_nl(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to IQ4_NL (n, 18)."""
    grid, values = IQ4Grid(), as_columns(blocks, 32)
    weights = as_columns(error_weights(blocks, importance), 32)
    d = to_f16(search_scale(values, weights, grid, IQ4_TARGETS))
    levels = grid.nearest(values, reciprocal(d), out=np.empty_like(values))
    return pack_blocks(FORMATS["IQ4_NL"], _iq4_codes(levels.T), d=f16_bytes(d[:, None]))


def encode_iq4_xs(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to IQ4_XS (n, 136)."""
    weights = error_weights(blocks, importance)
    fit = fit_scales(blocks, weights, 32, IQ4Grid(), IntegerGrid(-32, 31), IQ4_TARGETS)
    scales = (fit.scales + np.float32(32)).astype(np.uint8)
    low = (scales[:, ::2] & np.uint8(15)) | ((scales[:, 1::2] & np.uint8(15)) << np.uint8(4))
    shifted = (scales >> np.uint8(4)).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    high = np.bitwise_or.reduce(shifted, axis=1, keepdims=True).astype("<u2").view(np.uint8)
    d = f16_bytes(fit.d[:, None])
    return pack_blocks(FORMATS["IQ4_XS"], _iq4_codes(fit.levels), d=d, scales_h=high, scales_l=low)


# Midpoints between the positive FP4 levels, for |weight| / scale; a tie goes to the smaller level.
_FP4_MIDPOINTS = (LEVELS["MXFP4"][:7] + LEVELS["MXFP4"][1:8]) / np.float32(2)


def encode_mxfp4(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to MXFP4 (n, 17): the largest weight sets the power of two; importance is not used."""
    magnitudes = np.abs(blocks)
    largest = magnitudes.max(axis=1, keepdims=True)
    powers = np.floor(np.log2(largest)) + np.float32(125)
    exponents = np.where(largest > 0, np.maximum(powers, 0), 0).astype(np.uint8)
    magnitudes /= f16_of_power(exponents)
    quants = np.zeros(blocks.shape, np.uint8)
    for midpoint in _FP4_MIDPOINTS:
        quants += magnitudes > midpoint
    quants[(blocks < 0) & (quants > 0)] += np.uint8(8)
    return pack_blocks(FORMATS["MXFP4"], quants, e=exponents)


ENCODERS = {"IQ4_NL": encode_iq4_nl, "IQ4_XS": encode_iq4_xs, "MXFP4": encode_mxfp4}
