"""Encoders of blocks with one scale, or a scale and a minimum: Q1_0, Q4_0 to Q5_1, Q8_0."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import f16_bytes, pack_blocks
from edgeinfer_quant_formats.codecs.scale_search import (
    IntegerGrid,
    largest_magnitudes,
    reciprocal,
    search_scale,
    search_scale_and_minimum,
)
from edgeinfer_quant_formats.codecs.super_blocks import as_columns, error_weights, to_f16
from edgeinfer_quant_formats.formats import FORMATS, FormatSpec

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Encoder = Callable[[Floats, Floats | None], Bytes]

# Offsets of the search targets for the weight of largest magnitude: near the lowest quant, or near the
# highest, which is one closer to zero. With a minimum: offsets of the number of levels between the lowest and
# the highest weight.
TARGET_STEPS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
FAR_END_STEPS = (-0.3, 0.0, 0.3)
LEVEL_STEPS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)


def round_half_away(values: Floats) -> Floats:
    """The nearest integer; ties are rounded away from zero, as in C's roundf."""
    magnitudes = np.abs(values)
    floors = np.floor(magnitudes)
    floors += np.floor(2 * (magnitudes - floors))
    return np.copysign(floors, values)


def _around_zero(blocks: Floats, half_range: int) -> tuple[Bytes, Bytes]:
    """Scale and quants for which the weight of largest magnitude becomes -half_range."""
    d: Floats = largest_magnitudes(as_columns(blocks, 32))[:, None] / np.float32(-half_range)
    quants = blocks * reciprocal(d)
    quants += np.float32(half_range + 0.5)
    # The conversion to bytes truncates the fraction; none is below a half.
    np.clip(quants, np.float32(0), np.float32(2 * half_range - 1), out=quants)
    return f16_bytes(d), quants.astype(np.uint8)


def _from_minimum(blocks: Floats, highest: int) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, minimum and quants that map the range of the block to 0 to `highest`."""
    columns = as_columns(blocks, 32)
    minimum = columns.min(axis=0)[:, None]
    d = (columns.max(axis=0)[:, None] - minimum) / np.float32(highest)
    quants = (blocks - minimum) * reciprocal(d)
    quants += np.float32(0.5)
    np.clip(quants, np.float32(0), np.float32(highest), out=quants)
    return f16_bytes(d), f16_bytes(minimum), quants.astype(np.uint8)


def _fit_around_zero(blocks: Floats, importance: Floats, half_range: int) -> tuple[Bytes, Bytes]:
    """Scale and quants by search, with the least importance-weighted error."""
    grid, values = IntegerGrid(-half_range, half_range - 1), as_columns(blocks, 32)
    weights = as_columns(error_weights(blocks, importance), 32)
    targets = [step - half_range for step in TARGET_STEPS] + [half_range - 1 + step for step in FAR_END_STEPS]
    d = to_f16(search_scale(values, weights, grid, targets))
    levels = grid.nearest(values, reciprocal(d), out=np.empty_like(values))
    return f16_bytes(d[:, None]), (levels.T + np.float32(half_range)).astype(np.uint8)


def _fit_from_minimum(blocks: Floats, importance: Floats, highest: int) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, minimum and quants by search, with the least importance-weighted error."""
    grid, values = IntegerGrid(0, highest), as_columns(blocks, 32)
    weights = as_columns(error_weights(blocks, importance), 32)
    fit = search_scale_and_minimum(values, weights, highest, LEVEL_STEPS)
    d, minimum = to_f16(fit.scale), to_f16(-fit.minimum)
    levels = grid.nearest(values - minimum, reciprocal(d), out=np.empty_like(values))
    return f16_bytes(d[:, None]), f16_bytes(minimum[:, None]), levels.T.astype(np.uint8)


def _around_zero_encoder(spec: FormatSpec) -> Encoder:
    """Q4_0, Q5_0: levels from -offset on; searched with an importance."""

    def encode(blocks: Floats, importance: Floats | None) -> Bytes:
        if importance is None:
            d, codes = _around_zero(blocks, spec.offset)
        else:
            d, codes = _fit_around_zero(blocks, importance, spec.offset)
        return pack_blocks(spec, codes, d=d)

    return encode


def _from_minimum_encoder(spec: FormatSpec) -> Encoder:
    """Q4_1, Q5_1: levels from 0 on; searched with an importance."""

    def encode(blocks: Floats, importance: Floats | None) -> Bytes:
        highest = (1 << spec.bits) - 1
        if importance is None:
            d, minimum, codes = _from_minimum(blocks, highest)
        else:
            d, minimum, codes = _fit_from_minimum(blocks, importance, highest)
        return pack_blocks(spec, codes, d=d, m=minimum)

    return encode


def encode_q8_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to Q8_0 (n, 34); importance is not used."""
    largest: Floats = np.abs(largest_magnitudes(as_columns(blocks, 32))[:, None])
    d = largest / np.float32(127)
    quants = round_half_away(blocks * reciprocal(d)).astype(np.int8)
    return pack_blocks(FORMATS["Q8_0"], quants.view(np.uint8), d=f16_bytes(d))


def encode_q1_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 128) to Q1_0 (n, 18): the signs and the mean magnitude; importance is not used."""
    # Added in order, as the reference quantizer does: another order can round the scale differently.
    total: Floats = np.add.accumulate(np.abs(blocks), axis=1, dtype=np.float32)[:, -1:]
    return pack_blocks(FORMATS["Q1_0"], (blocks >= 0).astype(np.uint8), d=f16_bytes(total / np.float32(128)))


ENCODERS = {
    "Q1_0": encode_q1_0,
    **{name: _around_zero_encoder(FORMATS[name]) for name in ("Q4_0", "Q5_0")},
    **{name: _from_minimum_encoder(FORMATS[name]) for name in ("Q4_1", "Q5_1")},
    "Q8_0": encode_q8_0,
}
