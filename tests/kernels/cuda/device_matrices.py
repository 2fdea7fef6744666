"""Matrices of random weights and bits in the device layout, and activations as kernels read them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer.benchmarking.random_blocks import RandomBlocks
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import BLOCK, PlaneShapes, padded_blocks
from edgeinfer_quant_formats import block_format, encode
from edgeinfer_quant_formats.codecs import ENCODERS

Raw = npt.NDArray[np.uint8]
FLOATS: dict[str, np.uint16 | np.uint32] = {
    "F16": np.uint16(0xBFFF),
    "BF16": np.uint16(0xBFFF),
    "F32": np.uint32(0xBFFFFFFF),
}
"""Masks of random bits that leave finite numbers below 2."""
SOURCES = (
    "bits",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("normal", "extreme scales", "zeros")),
)
"""Contents of the rows of a test, as its parameters."""
EXTREMES = np.array([0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1], np.float16)
PLANES = 44
"""Planes of activations that have their float values as well."""


def normal_rows(name: str, rows: int, columns: int, seed: int = 0) -> Raw:
    """Normal weights in the file's bytes, (rows, bytes of a row)."""
    values = np.random.default_rng([seed, rows, columns]).standard_normal(rows * columns) * 0.05
    if block_format(name).grid or name not in ENCODERS:
        blocks = RandomBlocks(name, 0.05, np.random.default_rng([seed, rows, columns]))
        return blocks.take(values.size // block_format(name).block_elements).reshape(rows, -1)
    return np.array(encode(values.astype(np.float32), name)).reshape(rows, -1)


def random_bits(name: str, rows: int, columns: int, scales: npt.NDArray[np.float16] | None = None) -> Raw:
    """Random bits, with scales from `scales` or between 1/100 and 1/10 of either sign."""
    random, form = np.random.default_rng([rows, columns, *name.encode()]), block_format(name)
    count = rows * columns // form.block_elements
    blocks = random.integers(0, 256, (count, form.block_bytes), np.uint8)
    if name in FLOATS:
        bits = blocks.view(FLOATS[name].dtype) & FLOATS[name]
        return np.ascontiguousarray(bits).view(np.uint8).reshape(rows, -1)
    if name == "NVFP4":
        bounds = (0, 256) if scales is not None else (40, 64)
        blocks[:, :4] = random.integers(*bounds, (count, 4))
        return blocks.reshape(rows, -1)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(0 if scales is not None else 120, 130, count)
    if name == "IQ1_M":
        values = random.uniform(0.01, 0.1, count) if scales is None else random.choice(scales, count)
        bits = values.astype(np.float16).view(np.uint16)
        nibbles = bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
        at = form.field("scales").offset + 1
        blocks[:, at : at + 8 : 2] = blocks[:, at : at + 8 : 2] & 15 | nibbles.astype(np.uint8) << 4
        return blocks.reshape(rows, -1)
    scale = form.scales
    assert scale is not None
    for at in range(scale.offset, scale.offset + 2 * scale.count, 2) if name != "MXFP4" else ():
        small_scales = (random.uniform(0.01, 0.1, count) * random.choice([-1, 1], count)).astype(np.float16)
        sampled = small_scales if scales is None else random.choice(scales, count)
        blocks[:, at : at + 2] = sampled[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def rows_from(source: str, name: str, rows: int, columns: int) -> Raw:
    """Rows of one of SOURCES."""
    if source == "normal":
        return normal_rows(name, rows, columns)
    if source == "zeros":
        return np.zeros((rows, block_format(name).row_bytes(columns)), np.uint8)
    return random_bits(name, rows, columns, EXTREMES if source == "extreme scales" else None)


def device_matrix(device: str, name: str, raw: Raw, columns: int) -> DeviceMatrix:
    """The rows on the device, copied in two parts; memory that is not written holds garbage."""
    shapes = PlaneShapes.of("test", name, len(raw), columns)
    sizes = (shapes.words, shapes.scales, shapes.super_scales)
    parts = [torch.full(size, 0x7C017E03, dtype=torch.int32, device=device) for size in sizes]
    matrix = DeviceMatrix(shapes, name, *parts)
    middle = len(raw) // 4 * 2
    for first, last in ((0, middle), (middle, len(raw))):
        if last > first:
            matrix.fill(first, torch.from_numpy(raw[first:last]).to(device))
    return matrix


def block_order(columns: int) -> npt.NDArray[np.int64]:
    """The index of each block of a row, with padding."""
    blocks = padded_blocks(columns)
    index = np.arange(blocks)
    return index % 8 * (blocks // 8) + index // 8


def quantized(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """int8 (tokens, groups, 16) and scales (tokens, groups, 1): the largest of sixteen becomes 127."""
    groups = x.reshape(len(x), -1, 16)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.floor(groups * inverse + np.float32(0.5)).astype(np.int8), largest / np.float32(127)


def activation_planes(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """x (tokens, columns) as the words (tokens, PLANES, blocks) that kernels read."""
    tokens, columns = x.shape
    wide = np.zeros((tokens, padded_blocks(columns) * BLOCK), np.float32)
    wide[:, :columns] = x
    codes, scales = quantized(wide)
    per_block = [
        codes.reshape(tokens, -1, BLOCK).view(np.int32),
        scales.reshape(tokens, -1, 2).view(np.int32),
        codes.sum(-1, dtype=np.int32).reshape(tokens, -1, 2),
        wide.reshape(tokens, -1, BLOCK).view(np.int32),
    ]
    words = np.concatenate(per_block, axis=-1).transpose(0, 2, 1)
    out = np.empty(words.shape, np.int32)
    out[:, :, block_order(columns)] = words
    return out


def values_read(name: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The values of the activations as a kernel of this format reads them."""
    if name in FLOATS:
        return x.astype(np.float64)
    codes, scales = quantized(np.pad(x, ((0, 0), (0, -x.shape[1] % 16))))
    values = codes.astype(np.float64) * scales
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def relative(actual: Any, expected: Any) -> float:
    """The distance over the length of the expected array."""
    return float(np.linalg.norm(actual - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
