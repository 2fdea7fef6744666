"""Blocks of 32 weights with one scale, or a scale and a minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import read_half, unpack_fields

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


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


DECODERS = {
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1,
    "Q8_0": decode_q8_0,
}
