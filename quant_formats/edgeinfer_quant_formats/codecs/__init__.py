"""Decode blocks to float32 by their `FormatSpec`, encode float32 by the encoder of each format."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer_quant_formats.codecs import (
    codebooks,
    float_types,
    grid_encoding,
    k_quants,
    simple_blocks,
    ternary,
)
from edgeinfer_quant_formats.codecs.decoding import decode_blocks
from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.formats import FormatSpec, block_format

Encoder = Callable[[NDArray[np.float32], NDArray[np.float32] | None], NDArray[np.uint8]]
ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    float_types.ENCODERS
    | simple_blocks.ENCODERS
    | k_quants.ENCODERS
    | codebooks.ENCODERS
    | grid_encoding.ENCODERS
    | ternary.ENCODERS
)
INTEGER_DTYPES = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}

# Number of weights per piece, so that temporary arrays stay small and in the CPU cache.
DECODE_WEIGHTS = 1 << 16
ENCODE_WEIGHTS = 1 << 17

# Above the float16 scale of every block format, and below the overflow of the search sums.
LARGEST_WEIGHT = np.float32(1e10)
MIN_IMPORTANCE = np.float32(1e-6)


def decode(raw: bytes | NDArray[np.uint8], format: str | FormatSpec) -> NDArray[np.float32]:
    """Blocks of `format` as float32, (n,); bit-equal to gguf-py.

    `raw` is read in memory order, whatever its shape; it must hold whole blocks.

    Raises:
        FormatError: an unknown format, or bytes that don't fill whole blocks.
    """
    kind = block_format(format)
    data = np.frombuffer(raw, np.uint8) if not isinstance(raw, np.ndarray) else raw.view(np.uint8).reshape(-1)
    if data.size % kind.block_bytes:
        raise FormatError(
            f"{data.size} bytes are not a multiple of the {kind.name} block ({kind.block_bytes} bytes)"
        )
    blocks = data.reshape(-1, kind.block_bytes)
    decoder = partial(decode_blocks, kind) if kind.is_quantized else float_types.DECODERS[kind.name]
    step = DECODE_WEIGHTS // kind.block_elements
    # Damaged scales are infinite or NaN; as in gguf-py the weights then are too, without a warning.
    with np.errstate(all="ignore"):
        if 0 < len(blocks) <= step:
            return decoder(blocks).reshape(-1)
        out = np.empty((len(blocks), kind.block_elements), np.float32)
        for start in range(0, len(blocks), step):
            out[start : start + step] = decoder(blocks[start : start + step])
    return out.reshape(-1)


def encode(
    values: ArrayLike, format: str | FormatSpec, importance: ArrayLike | None = None
) -> NDArray[np.uint8]:
    """Weights as blocks of `format`, (bytes,).

    `importance` has a weight for the squared error of each column, (columns,), such as the mean square of its
    input activations. All formats use it except Q8_0, MXFP4, TQ1_0, TQ2_0 and plain numbers.

    Raises:
        FormatError: a format without an encoder; weights that don't fill whole blocks, that are not finite
            or too large for the format; an importance that does not fit.
    """
    kind = block_format(format)
    if kind.name not in (*ENCODERS, *INTEGER_DTYPES, "F64"):
        raise FormatError(f"format {kind.name} has no encoder, wanted one of {', '.join(ENCODERS)}")
    if kind.name in INTEGER_DTYPES:
        return _encode_integers(np.asarray(values), kind)
    if kind.name == "F64":
        return np.ascontiguousarray(values, "<f8").reshape(-1).view(np.uint8)
    weights = np.asarray(values).reshape(-1)
    if weights.size % kind.block_elements:
        raise FormatError(
            f"{weights.size} weights are not a multiple of the {kind.name} block ({kind.block_elements})"
        )
    blocks = weights.reshape(-1, kind.block_elements)
    columns = None if importance is None else _importance_blocks(importance, weights.size, kind)
    out = np.empty((len(blocks), kind.block_bytes), np.uint8)
    step = ENCODE_WEIGHTS // kind.block_elements
    for start in range(0, len(blocks), step):
        piece = np.ascontiguousarray(blocks[start : start + step], np.float32)
        if kind.block_elements > 1:
            _check_magnitudes(piece, start * kind.block_elements, kind)
        share = None
        if columns is not None:
            share = columns[np.arange(start, start + len(piece)) % len(columns)]
        with np.errstate(all="ignore"):
            out[start : start + step] = ENCODERS[kind.name](piece, share)
    return out.reshape(-1)


def _check_magnitudes(blocks: NDArray[np.float32], first: int, kind: FormatSpec) -> None:
    if not (blocks.min() >= -LARGEST_WEIGHT and blocks.max() <= LARGEST_WEIGHT):
        fits = np.abs(blocks) <= LARGEST_WEIGHT
        index = int(np.argmin(fits))
        raise FormatError(
            f"weight {first + index} is {blocks.reshape(-1)[index]:g}, wanted finite weights of at most "
            f"{LARGEST_WEIGHT:g} for {kind.name}"
        )


def _importance_blocks(importance: ArrayLike, count: int, kind: FormatSpec) -> NDArray[np.float32]:
    array = np.asarray(importance, np.float32)
    if array.ndim != 1 or array.size < 1 or array.size % kind.block_elements or count % array.size:
        raise FormatError(
            f"importance of shape {array.shape}, wanted one number per column: whole {kind.name} blocks "
            f"({kind.block_elements}) that go into {count} weights"
        )
    if not (np.isfinite(array) & (array >= 0)).all():
        raise FormatError(f"importance from {array.min()} to {array.max()}, wanted finite and at least 0")
    # A column that was never active gets a small importance; otherwise all its weights would become zero.
    array = np.maximum(array, array.max() * MIN_IMPORTANCE) if array.any() else np.ones_like(array)
    return array.reshape(-1, kind.block_elements)


def _encode_integers(values: NDArray[Any], kind: FormatSpec) -> NDArray[np.uint8]:
    dtype = INTEGER_DTYPES[kind.name]
    stored = values.reshape(-1).astype(dtype)
    if not np.array_equal(stored, values.reshape(-1)):
        limits = np.iinfo(dtype)
        raise FormatError(
            f"numbers from {values.min()} to {values.max()}, wanted integers of {kind.name} "
            f"({limits.min} to {limits.max})"
        )
    return stored.view(np.uint8)
