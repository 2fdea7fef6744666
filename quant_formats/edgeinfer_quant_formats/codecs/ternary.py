"""Ternary formats: TQ1_0 (five weights per byte) and the encoders of TQ2_0 and Q2_0 (four per byte)."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import f16_bytes, pack_blocks
from edgeinfer_quant_formats.codecs.scale_search import reciprocal
from edgeinfer_quant_formats.codecs.simple_blocks import round_half_away
from edgeinfer_quant_formats.formats import FORMATS, FormatSpec

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

POWERS_OF_THREE = np.array([1, 3, 9, 27, 81], np.uint8)


def unpack_base_three(spec: FormatSpec, blocks: Bytes) -> Bytes:
    """The ternary digits of TQ1_0, (n, 256).

    A byte holds its digits as a fraction of 256: multiplied by 3^k, the integer part of three times the
    remainder is digit k. 32 bytes of five digits, 16 of five, 4 of four.
    """
    digits = [
        (blocks[:, None, start:end] * POWERS_OF_THREE[:count, None]).reshape(len(blocks), -1)
        for start, end, count in ((0, 32, 5), (32, 48, 5), (48, spec.field("qh").end, 4))
    ]
    thirds = (np.hstack(digits).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return thirds.astype(np.uint8)


def _digits(blocks: Floats) -> tuple[Bytes, Bytes]:
    """Scale (n, 2) and ternary digits 0, 1, 2 (n, 256): the largest magnitude is one step."""
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    rounded = round_half_away(blocks * reciprocal(scale))
    return f16_bytes(scale), (rounded + np.float32(1)).astype(np.uint8)


def encode_tq1_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to TQ1_0 (n, 54); importance is not used."""
    scale, digits = _digits(blocks)
    packed = [
        (digits[:, start : start + count * group].reshape(-1, count, group) * factors[:, None]).sum(
            axis=1, dtype=np.uint16
        )
        for start, count, group, factors in (
            (0, 5, 32, POWERS_OF_THREE[::-1]),
            (160, 5, 16, POWERS_OF_THREE[::-1]),
            (240, 4, 4, POWERS_OF_THREE[:0:-1]),
        )
    ]
    # As a fraction of 256, rounded up, because decoding extracts the digits from the top.
    fractions = (np.hstack(packed) * np.uint16(256) + np.uint16(242)) // np.uint16(243)
    return np.hstack((fractions.astype(np.uint8), scale))


def encode_tq2_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to TQ2_0 (n, 66); importance is not used."""
    scale, digits = _digits(blocks)
    return pack_blocks(FORMATS["TQ2_0"], digits, d=scale)


def encode_q2_0(blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 64) to Q2_0 (n, 18): as TQ2_0, without the level 2; importance is not used."""
    scale, digits = _digits(blocks)
    return pack_blocks(FORMATS["Q2_0"], digits, d=scale)


ENCODERS = {"Q2_0": encode_q2_0, "TQ1_0": encode_tq1_0, "TQ2_0": encode_tq2_0}
