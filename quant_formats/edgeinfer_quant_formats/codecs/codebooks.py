"""Blocks whose 4-bit quants are looked up in a table of uneven steps: IQ4_NL, IQ4_XS, MXFP4."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import read_half, unpack_fields

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


DECODERS = {"IQ4_NL": decode_iq4_nl, "IQ4_XS": decode_iq4_xs, "MXFP4": decode_mxfp4}
