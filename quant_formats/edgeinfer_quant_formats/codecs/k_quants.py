"""Encoders of K-quants: the fits of `super_blocks`, packed as their `FormatSpec` says."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import f16_bytes, pack_blocks, pack_fields
from edgeinfer_quant_formats.codecs.scale_search import Floats, IntegerGrid
from edgeinfer_quant_formats.codecs.super_blocks import (
    SuperBlocks,
    error_weights,
    fit_scales,
    fit_scales_and_minima,
)
from edgeinfer_quant_formats.formats import FORMATS

Bytes = NDArray[np.uint8]

# Target values for the largest weight of a sub-block in the search: near the farthest level of the grid, for
# Q3_K at both of its ends. Formats with a minimum vary the number of levels between the lowest and the
# highest weight.
Q3_K_TARGETS = (-4.9, -4.6, -4.3, -4.0, -3.7, -3.4, -3.1, 2.9, 3.2, 3.5)
Q6_K_TARGETS = (-32.9, -32.6, -32.3, -32.0, -31.7, -31.4, -31.1)
EXTRA_LEVELS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)


def _bytes(values: Floats, offset: int = 0) -> Bytes:
    """Small integers stored as floats, plus `offset`, as bytes."""
    return (values + np.float32(offset)).astype(np.uint8)


def _packed(name: str, fit: SuperBlocks, codes: Bytes, scales: Bytes) -> Bytes:
    """Blocks with the codes and packed sub-block scales of a fit."""
    d, dmin = f16_bytes(fit.d[:, None]), f16_bytes(fit.dmin[:, None])
    return pack_blocks(FORMATS[name], codes, d=d, dmin=dmin, scales=scales)


def encode_q2_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to Q2_K (n, 84)."""
    weights = error_weights(blocks, importance, coarse=True)
    fit = fit_scales_and_minima(blocks, weights, 16, 3, IntegerGrid(0, 15), EXTRA_LEVELS)
    scales = _bytes(fit.scales) | (_bytes(fit.minima) << np.uint8(4))
    return _packed("Q2_K", fit, _bytes(fit.levels), scales)


def pack_q3_k_scales(scales: Bytes) -> Bytes:
    """Sixteen 6-bit scales, plus 32, in 12 bytes: low nibbles, then the upper two bits."""
    low = pack_fields(scales & np.uint8(15), 4, 8)
    return np.hstack((low, pack_fields(scales >> np.uint8(4), 2, 4)))


def encode_q3_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to Q3_K (n, 110)."""
    weights = error_weights(blocks, importance)
    fit = fit_scales(blocks, weights, 16, IntegerGrid(-4, 3), IntegerGrid(-32, 31), Q3_K_TARGETS)
    scales = pack_q3_k_scales(_bytes(fit.scales, offset=32))
    return _packed("Q3_K", fit, _bytes(fit.levels, offset=4), scales)


def pack_scales_and_minima(scales: Bytes, minima: Bytes) -> Bytes:
    """Eight 6-bit scales and minima in 12 bytes: the inverse of `decoding.unpack_scales_and_minima`."""
    high = [(field[:, 4:] >> np.uint8(4)) << np.uint8(6) for field in (scales, minima)]
    late = (scales[:, 4:] & np.uint8(15)) | ((minima[:, 4:] & np.uint8(15)) << np.uint8(4))
    return np.hstack((scales[:, :4] | high[0], minima[:, :4] | high[1], late))


def _with_six_bit_minima(name: str, blocks: Floats, importance: Floats | None) -> Bytes:
    weights, highest = error_weights(blocks, importance), (1 << FORMATS[name].bits) - 1
    fit = fit_scales_and_minima(blocks, weights, 32, highest, IntegerGrid(0, 63), EXTRA_LEVELS)
    scales = pack_scales_and_minima(_bytes(fit.scales), _bytes(fit.minima))
    return _packed(name, fit, _bytes(fit.levels), scales)


def encode_q4_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to Q4_K (n, 144)."""
    return _with_six_bit_minima("Q4_K", blocks, importance)


def encode_q5_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to Q5_K (n, 176)."""
    return _with_six_bit_minima("Q5_K", blocks, importance)


def encode_q6_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to Q6_K (n, 210)."""
    weights = error_weights(blocks, importance)
    fit = fit_scales(blocks, weights, 16, IntegerGrid(-32, 31), IntegerGrid(-128, 127), Q6_K_TARGETS)
    scales = fit.scales.astype(np.int8).view(np.uint8)
    return _packed("Q6_K", fit, _bytes(fit.levels, offset=32), scales)


ENCODERS = {
    "Q2_K": encode_q2_k,
    "Q3_K": encode_q3_k,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
}
