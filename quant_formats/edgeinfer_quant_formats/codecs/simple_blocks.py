"""Blocks of 32 weights with one scale, or a scale and a minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import half_bytes, pack_fields, read_half, unpack_fields
from edgeinfer_quant_formats.codecs.scale_search import (
    IntegerGrid,
    largest_magnitudes,
    reciprocal,
    search_scale,
    search_scale_and_minimum,
)
from edgeinfer_quant_formats.codecs.super_blocks import as_columns, error_weights, to_half

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Offsets of the search targets for the weight of largest magnitude: near the lowest quant, or near the
# highest, which is one closer to zero. With a minimum: offsets of the number of levels between the lowest and
# the highest weight.
TARGET_STEPS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
FAR_END_STEPS = (-0.3, 0.0, 0.3)
LEVEL_STEPS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Nibbles of (n, 16) bytes, each with a fifth bit from (n, 4) bytes, -> (n, 32)."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return unpack_fields(low, 4, 16) | (fifth << np.uint8(4))


def decode_q4_0(blocks: Bytes) -> Floats:
    """Q4_0: `half d; uint8 qs[16]`; weight = d·(q - 8), nibbles low then high."""
    quants = unpack_fields(blocks[:, 2:], 4, 16).view(np.int8) - np.int8(8)
    return read_half(blocks[:, :2]) * quants.astype(np.float32)


def decode_q4_1(blocks: Bytes) -> Floats:
    """Q4_1: `half d, m; uint8 qs[16]`; weight = d·q + m."""
    quants = unpack_fields(blocks[:, 4:], 4, 16).astype(np.float32)
    return read_half(blocks[:, :2]) * quants + read_half(blocks[:, 2:4])


def decode_q5_0(blocks: Bytes) -> Floats:
    """Q5_0: `half d; uint32 qh; uint8 qs[16]`; weight = d·(q - 16), fifth bits in qh."""
    quants = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    return read_half(blocks[:, :2]) * quants.astype(np.float32)


def decode_q5_1(blocks: Bytes) -> Floats:
    """Q5_1: `half d, m; uint32 qh; uint8 qs[16]`; weight = d·q + m."""
    quants = _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    return read_half(blocks[:, :2]) * quants + read_half(blocks[:, 2:4])


def decode_q8_0(blocks: Bytes) -> Floats:
    """Q8_0: `half d; int8 qs[32]`; weight = d·q."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * read_half(blocks[:, :2])


def round_half_away(values: Floats) -> Floats:
    """The nearest integer; ties are rounded away from zero, as in C's roundf."""
    magnitudes = np.abs(values)
    floors = np.floor(magnitudes)
    floors += np.floor(2 * (magnitudes - floors))
    return np.copysign(floors, values)


def _pack_five_bits(quants: Bytes) -> tuple[Bytes, Bytes]:
    """The inverse of `_five_bits`."""
    high = np.packbits(quants >> np.uint8(4), axis=1, bitorder="little")
    return high, pack_fields(quants & np.uint8(15), 4, 16)


def _around_zero(blocks: Floats, half_range: int) -> tuple[Bytes, Bytes]:
    """Scale and quants for which the weight of largest magnitude becomes -half_range."""
    d: Floats = largest_magnitudes(as_columns(blocks, 32))[:, None] / np.float32(-half_range)
    quants = blocks * reciprocal(d)
    quants += np.float32(half_range + 0.5)
    # The conversion to bytes truncates the fraction; none is below a half.
    np.clip(quants, np.float32(0), np.float32(2 * half_range - 1), out=quants)
    return half_bytes(d), quants.astype(np.uint8)


def _from_minimum(blocks: Floats, highest: int) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, minimum and quants that map the range of the block to 0 to `highest`."""
    columns = as_columns(blocks, 32)
    minimum = columns.min(axis=0)[:, None]
    d = (columns.max(axis=0)[:, None] - minimum) / np.float32(highest)
    quants = (blocks - minimum) * reciprocal(d)
    quants += np.float32(0.5)
    np.clip(quants, np.float32(0), np.float32(highest), out=quants)
    return half_bytes(d), half_bytes(minimum), quants.astype(np.uint8)


def _fit_around_zero(blocks: Floats, importance: Floats, half_range: int) -> tuple[Bytes, Bytes]:
    """Scale and quants by search, with the least importance-weighted error."""
    grid, values = IntegerGrid(-half_range, half_range - 1), as_columns(blocks, 32)
    weights = as_columns(error_weights(blocks, importance), 32)
    targets = [step - half_range for step in TARGET_STEPS] + [half_range - 1 + step for step in FAR_END_STEPS]
    d = to_half(search_scale(values, weights, grid, targets))
    levels = grid.nearest(values, reciprocal(d), out=np.empty_like(values))
    return half_bytes(d[:, None]), (levels.T + np.float32(half_range)).astype(np.uint8)


def _fit_from_minimum(blocks: Floats, importance: Floats, highest: int) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, minimum and quants by search, with the least importance-weighted error."""
    grid, values = IntegerGrid(0, highest), as_columns(blocks, 32)
    weights = as_columns(error_weights(blocks, importance), 32)
    found = search_scale_and_minimum(values, weights, highest, LEVEL_STEPS)
    d, minimum = to_half(found.scale), to_half(-found.minimum)
    levels = grid.nearest(values - minimum, reciprocal(d), out=np.empty_like(values))
    return half_bytes(d[:, None]), half_bytes(minimum[:, None]), levels.T.astype(np.uint8)


def encode_q4_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to Q4_0 (n, 18)."""
    d, quants = _around_zero(blocks, 8) if importance is None else _fit_around_zero(blocks, importance, 8)
    return np.hstack((d, pack_fields(quants, 4, 16)))


def encode_q4_1(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to Q4_1 (n, 20)."""
    d, minimum, quants = (
        _from_minimum(blocks, 15) if importance is None else _fit_from_minimum(blocks, importance, 15)
    )
    return np.hstack((d, minimum, pack_fields(quants, 4, 16)))


def encode_q5_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to Q5_0 (n, 22)."""
    d, quants = _around_zero(blocks, 16) if importance is None else _fit_around_zero(blocks, importance, 16)
    return np.hstack((d, *_pack_five_bits(quants)))


def encode_q5_1(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to Q5_1 (n, 24)."""
    d, minimum, quants = (
        _from_minimum(blocks, 31) if importance is None else _fit_from_minimum(blocks, importance, 31)
    )
    return np.hstack((d, minimum, *_pack_five_bits(quants)))


def encode_q8_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 32) to Q8_0 (n, 34); importance is not used."""
    largest: Floats = np.abs(largest_magnitudes(as_columns(blocks, 32))[:, None])
    d = largest / np.float32(127)
    quants = round_half_away(blocks * reciprocal(d)).astype(np.int8)
    return np.hstack((half_bytes(d), quants.view(np.uint8)))


ENCODERS = {
    "Q4_0": encode_q4_0,
    "Q4_1": encode_q4_1,
    "Q5_0": encode_q5_0,
    "Q5_1": encode_q5_1,
    "Q8_0": encode_q8_0,
}
DECODERS = {
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1,
    "Q8_0": decode_q8_0,
}
