"""Decoders of K-quants: super-blocks of 256 weights whose sub-blocks have quantized scales."""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import read_half, unpack_fields

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _scaled(scales: Floats, quants: NDArray[np.uint8] | NDArray[np.int8]) -> Floats:
    """scales (n, s) times quants (n, 256), each scale for 256/s consecutive quants, -> (n, s, 256/s)."""
    grouped = quants.reshape(*scales.shape, -1).astype(np.float32)
    grouped *= scales[:, :, None]
    return grouped


def decode_q2_k(blocks: Bytes) -> Floats:
    """Q2_K: `uint8 scales[16]; uint8 qs[64]; half d, dmin`.

    16 sub-blocks of 16; weight = d·(scale & 15)·q - dmin·(scale >> 4).
    """
    scales, quants = blocks[:, :16], unpack_fields(blocks[:, 16:80], 2, 32)
    step = read_half(blocks[:, 80:82]) * (scales & np.uint8(15)).astype(np.float32)
    minimum = read_half(blocks[:, 82:84]) * (scales >> np.uint8(4)).astype(np.float32)
    weights = _scaled(step, quants)
    weights -= minimum[:, :, None]
    return weights.reshape(len(blocks), 256)


def unpack_q3_k_scales(packed: Bytes) -> NDArray[np.int8]:
    """Sixteen 6-bit scales minus 32 from (n, 12) bytes: the four low bits in 8 bytes, the two high
    bits in 4.
    """
    low = unpack_fields(packed[:, :8], 4, 8)
    high = unpack_fields(packed[:, 8:], 2, 4)
    scales: NDArray[np.int8] = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return scales


def decode_q3_k(blocks: Bytes) -> Floats:
    """Q3_K: `uint8 hmask[32]; uint8 qs[64]; uint8 scales[12]; half d`.

    16 sub-blocks of 16; weight = d·scale·(q - 4), the third bit of q in hmask.
    """
    low = unpack_fields(blocks[:, 32:96], 2, 32)
    high = unpack_fields(blocks[:, :32], 1, 32)
    quants = (low | (high << np.uint8(2))).view(np.int8) - np.int8(4)
    scales = unpack_q3_k_scales(blocks[:, 96:108]).astype(np.float32)
    return _scaled(read_half(blocks[:, 108:110]) * scales, quants).reshape(len(blocks), 256)


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


def _scale_and_minimum(blocks: Bytes, quants: Bytes) -> Floats:
    scales, minima = unpack_scales_and_minima(blocks[:, 4:16])
    weights = _scaled(read_half(blocks[:, :2]) * scales.astype(np.float32), quants)
    weights -= (read_half(blocks[:, 2:4]) * minima.astype(np.float32))[:, :, None]
    return weights.reshape(len(blocks), 256)


def decode_q4_k(blocks: Bytes) -> Floats:
    """Q4_K: `half d, dmin; uint8 scales[12]; uint8 qs[128]`.

    8 sub-blocks of 32; weight = d·scale·q - dmin·minimum.
    """
    return _scale_and_minimum(blocks, unpack_fields(blocks[:, 16:], 4, 32))


def decode_q5_k(blocks: Bytes) -> Floats:
    """Q5_K: `half d, dmin; uint8 scales[12]; uint8 qh[32]; uint8 qs[128]`; as Q4_K, fifth bits in qh."""
    high = unpack_fields(blocks[:, 16:48], 1, 32)
    high <<= np.uint8(4)
    high |= unpack_fields(blocks[:, 48:], 4, 32)
    return _scale_and_minimum(blocks, high)


def decode_q6_k(blocks: Bytes) -> Floats:
    """Q6_K: `uint8 ql[128]; uint8 qh[64]; int8 scales[16]; half d`.

    16 sub-blocks of 16; weight = d·scale·(q - 32), the upper two bits of q in qh.
    """
    quants = unpack_fields(blocks[:, 128:192], 2, 32)
    quants <<= np.uint8(4)
    quants |= unpack_fields(blocks[:, :128], 4, 64)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    centred = quants.view(np.int8) - np.int8(32)
    return _scaled(read_half(blocks[:, 208:210]) * scales, centred).reshape(len(blocks), 256)


DECODERS = {
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
}
