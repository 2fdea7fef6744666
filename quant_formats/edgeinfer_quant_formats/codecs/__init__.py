"""Blocks to float32 and back: one pair of functions per format, gathered here by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer_quant_formats.block_formats import BlockFormat, block_format
from edgeinfer_quant_formats.codecs import (
    codebooks,
    float_types,
    k_quants,
    simple_blocks,
    ternary,
)
from edgeinfer_quant_formats.errors import FormatError

Decoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
DECODERS: Mapping[str, Decoder] = MappingProxyType(
    float_types.DECODERS | simple_blocks.DECODERS | k_quants.DECODERS | codebooks.DECODERS | ternary.DECODERS
)

# Work in pieces that stay in the cache and keep the temporary arrays small.
DECODE_WEIGHTS = 1 << 16


def decode(raw: bytes | NDArray[np.uint8], format: str | BlockFormat) -> NDArray[np.float32]:
    """Blocks of `format` as float32, (n,); bit-equal to gguf-py.

    `raw` is read as it lies, whatever its shape; it must hold whole blocks.

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
    out = np.empty((len(blocks), kind.block_elements), np.float32)
    decoder, step = DECODERS[kind.name], DECODE_WEIGHTS // kind.block_elements
    # Damaged scales are infinite or NaN; the weights then are too, as in gguf-py, without a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = decoder(blocks[start : start + step])
    return out.reshape(-1)


def encode(
    values: ArrayLike, format: str | BlockFormat, importance: ArrayLike | None = None
) -> NDArray[np.uint8]:
    kind = block_format(format)
    if kind.name in ("F32", "F16"):
        array: Any = np.asarray(values, np.float32).astype("<f4" if kind.name == "F32" else "<f2")
        return array.reshape(-1).view(np.uint8)  # type: ignore[no-any-return]
    raise FormatError(f"encoding {kind.name} is not written yet")
