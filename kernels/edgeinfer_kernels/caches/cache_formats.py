"""Quantization of KV cache elements: int8, or 4 bits of heads in the Hadamard basis, with block scales; FP8.

Heads are multiplied with an orthonormal Hadamard matrix. This spreads an outlier over its block and preserves
the dot product of a query and a key. Source: Ashkboos et al. 2024, "QuaRot", §4; block Q4_0 of ggml.
"""

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.runtime.abi import SCALED

Rows = npt.NDArray[np.floating]
Codes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float16]
LARGEST = np.float32(65504)
FP8_MAX = np.float32(448)
FP8_SHRINK = np.float32(2.0**-120)
"""Changes the exponent bias of float32 to that of E4M3, whose smallest numbers become subnormal."""


def rotation_block(head_dim: int) -> int:
    """Block size of the Hadamard transform, in elements: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def hadamard_rows(rows: Rows) -> npt.NDArray[np.float32]:
    """(..., head_dim) float32: rows times the orthonormal Hadamard matrix, block by block; applied twice, it
    is the identity.

    H(1) = 1, H(2n) = (H(n) H(n); H(n) -H(n)) / √2.
    """
    head_dim = rows.shape[-1]
    block = rotation_block(head_dim)
    x = np.array(rows, np.float32).reshape(-1, block)
    step = 1
    while step < block:
        pairs = x.reshape(len(x), -1, 2, step)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        x = x.reshape(-1, block)
        step *= 2
    return np.asarray(x * np.float32(block**-0.5)).reshape(rows.shape)


def _groups(rows: Rows) -> npt.NDArray[np.float32]:
    """Reshape (..., width) to (..., groups, SCALED), zero-padded after the last element."""
    *outer, width = rows.shape
    groups = -(-width // SCALED)
    whole = np.zeros((*outer, groups * SCALED), np.float32)
    whole[..., :width] = rows
    return whole.reshape(*outer, groups, SCALED)


def _coded(rows: Rows, parts: npt.NDArray[np.float32], scales: Scales, min_code: int, max_code: int) -> Codes:
    """Elements divided by their scales, rounded to the nearest integer and clipped to `min_code`…`max_code`;
    0 where the scale is 0.
    """
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
    codes = np.clip(np.rint(parts * inverse[..., None]), min_code, max_code).astype(np.int8)
    return codes.reshape(*rows.shape[:-1], -1)[..., : rows.shape[-1]]


def rounded_to_bytes(rows: Rows) -> tuple[Codes, Scales]:
    """Quantize (..., width) to int8, with a float16 scale for each `SCALED` elements: (..., groups).

    scale = max|x| / 127 as float16, code = x / scale, rounded to nearest.
    """
    parts = _groups(rows)
    scales = np.minimum(np.abs(parts).max(-1) / np.float32(127), LARGEST).astype(np.float16)
    return _coded(rows, parts, scales, -127, 127), scales


def rounded_to_nibbles(rows: Rows) -> tuple[Codes, Scales]:
    """Quantize (..., width) to codes -8…7, with a float16 scale for each `SCALED` elements: (..., groups).

    scale = x / -8 as float16, for the x with the largest magnitude in its group; code = x / scale, rounded to
    nearest.
    """
    parts = _groups(rows)
    highest, lowest = parts.max(-1), parts.min(-1)
    furthest = np.where(highest > -lowest, highest, lowest)
    scales = np.clip(furthest / np.float32(-8), -LARGEST, LARGEST).astype(np.float16)
    return _coded(rows, parts, scales, -8, 7), scales


def widened(codes: Codes, scales: Scales) -> npt.NDArray[np.float32]:
    """Dequantize codes of `rounded_to_bytes` or `rounded_to_nibbles`: (..., width) float32."""
    spread = np.repeat(scales.astype(np.float32), SCALED, axis=-1)[..., : codes.shape[-1]]
    return np.asarray(codes.astype(np.float32) * spread)


def to_fp8(rows: Rows) -> npt.NDArray[np.uint8]:
    """Elements as FP8 (E4M3: a sign, 4 exponent bits with bias 7, 3 mantissa bits), rounded to nearest, ties
    to even, and clipped to ±448.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning", §3.
    """
    x = np.fmin(np.fmax(rows.astype(np.float32), -FP8_MAX), FP8_MAX)
    bits = (x * FP8_SHRINK).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = (magnitude + (magnitude >> np.uint32(20) & np.uint32(1)) + np.uint32(0x7FFFF)) >> np.uint32(20)
    return (rounded | bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)


def from_fp8(codes: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """The inverse of `to_fp8`; exact."""
    wide = codes.astype(np.uint32)
    bits = (wide & np.uint32(0x80)) << np.uint32(24) | (wide & np.uint32(0x7F)) << np.uint32(20)
    return bits.view(np.float32) / FP8_SHRINK


def nibble_bytes(width: int) -> int:
    """Bytes of a row of `width` 4-bit codes, padded to whole groups."""
    return -(-width // SCALED) * SCALED // 2


def packed_in_pairs(codes: Codes) -> npt.NDArray[np.uint8]:
    """Pack (..., even width) codes -8…7 as uint8: two adjacent codes per byte, the first in the low nibble,
    each plus 8.
    """
    raised = (codes + 8).astype(np.uint8)
    return np.asarray(raised[..., 0::2] | raised[..., 1::2] << 4)


def unpacked_pairs(packed: npt.NDArray[np.uint8]) -> Codes:
    """The inverse of `packed_in_pairs`."""
    both = np.stack([packed & 15, packed >> 4], -1).astype(np.int8) - np.int8(8)
    return both.reshape(*packed.shape[:-1], -1)


def packed_in_groups(codes: Codes) -> npt.NDArray[np.uint8]:
    """Pack (..., width) codes -8…7: the first half of each `SCALED` codes is in the low nibbles of its bytes,
    as in Q4_0.
    """
    *outer, width = codes.shape
    raised = np.full((*outer, 2 * nibble_bytes(width)), 8, np.uint8)
    raised[..., :width] = codes + 8
    low, high = np.moveaxis(raised.reshape(*outer, -1, 2, SCALED // 2), -2, 0)
    return np.asarray(low | high << 4).reshape(*outer, -1)


def unpacked_groups(packed: npt.NDArray[np.uint8], width: int) -> Codes:
    """The inverse of `packed_in_groups`: the first `width` codes of each row."""
    parts = packed.reshape(*packed.shape[:-1], -1, SCALED // 2)
    both = np.stack([parts & 15, parts >> 4], -2).astype(np.int8) - np.int8(8)
    return both.reshape(*packed.shape[:-1], -1)[..., :width]
