"""Encoders of the IQ types whose levels are rows of a grid: the fits of `grid_search`, packed."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import f16_bytes, join_fields, pack_fields
from edgeinfer_quant_formats.codecs.grid_search import Floats, GridFit, GridSearch
from edgeinfer_quant_formats.codecs.scale_search import reciprocal
from edgeinfer_quant_formats.codecs.super_blocks import error_weights
from edgeinfer_quant_formats.formats import FORMATS

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

PARITY_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
"""Seven bits store the signs of eight weights: the number of negative signs is even."""


def _low(fit: GridFit) -> Bytes:
    """The lowest byte of each row's index."""
    return (fit.rows & 255).astype(np.uint8)


def _high(fit: GridFit) -> Bytes:
    """The other bits of each row's index."""
    return (fit.rows >> 8).astype(np.uint8)


def _scales(fit: GridFit) -> Bytes:
    """The codes of the odd scales."""
    return ((fit.scales - np.float32(1)) * np.float32(0.5)).astype(np.uint8)


def _d(fit: GridFit) -> Bytes:
    return f16_bytes(fit.d[:, None])


def _words(parts: Words, bits: int) -> Words:
    """The parts of each word, (n, words, parts) of `bits` each, lowest first, as (n, words)."""
    shifts = np.arange(parts.shape[2], dtype=np.uint32) * np.uint32(bits)
    words: Words = np.bitwise_or.reduce(parts << shifts, axis=2)
    return words


def _as_bytes(words: Words, dtype: str) -> Bytes:
    return np.ascontiguousarray(words.astype(dtype)).view(np.uint8).reshape(len(words), -1)


def _sign_words(fit: GridFit, signs: Bytes) -> Words:
    """Of 32 weights a word: four sign codes of seven bits, and the scale, (n, 8)."""
    codes = (signs & np.uint8(127)).astype(np.uint32).reshape(len(signs), 8, 4)
    return _words(codes, 7) | (_scales(fit).astype(np.uint32) << np.uint32(28))


def _iq2_xxs(fit: GridFit, signs: Bytes) -> dict[str, Bytes]:
    rows = _low(fit).reshape(-1, 8, 4).view("<u4")[..., 0]
    return {"d": _d(fit), "qs": _as_bytes(np.stack((rows, _sign_words(fit, signs)), axis=2), "<u4")}


def _iq2_xs(fit: GridFit, signs: Bytes) -> dict[str, Bytes]:
    words = fit.rows.astype(np.uint32) | ((signs & np.uint8(127)).astype(np.uint32) << np.uint32(9))
    return {"d": _d(fit), "qs": _as_bytes(words, "<u2"), "scales": pack_fields(_scales(fit), 4, 1)}


def _plain_signs(fit: GridFit, signs: Bytes, high_bits: int) -> dict[str, Bytes]:
    """IQ2_S and IQ3_S."""
    high, scales = pack_fields(_high(fit), high_bits, 1), pack_fields(_scales(fit), 4, 1)
    return {"d": _d(fit), "qs": _low(fit), "signs": signs, "qh": high, "scales": scales}


def _iq3_xxs(fit: GridFit, signs: Bytes) -> dict[str, Bytes]:
    return {"d": _d(fit), "qs": _low(fit), "scales": _as_bytes(_sign_words(fit, signs), "<u4")}


def _iq1_s(fit: GridFit, signs: Bytes) -> dict[str, Bytes]:
    high = _words(_high(fit).astype(np.uint32).reshape(-1, 8, 4), 3)
    shifts = fit.tables[:, ::4].astype(np.uint32) << np.uint32(15)
    high |= (_scales(fit).astype(np.uint32) << np.uint32(12)) | shifts
    return {"d": _d(fit), "qs": _low(fit), "qh": _as_bytes(high, "<u2")}


def _iq1_m(fit: GridFit, signs: Bytes) -> dict[str, Bytes]:
    high = pack_fields(_high(fit) | (fit.tables.astype(np.uint8) << np.uint8(3)), 4, 1)
    words = _words(_scales(fit).astype(np.uint32).reshape(-1, 4, 4), 3)
    d = _d(fit).view("<u2").astype(np.uint32) >> np.arange(0, 16, 4, dtype=np.uint32)
    words |= (d & np.uint32(15)) << np.uint32(12)
    return {"qs": _low(fit), "qh": high, "scales": _as_bytes(words, "<u2")}


_PACKERS: dict[str, Callable[[GridFit, Bytes], dict[str, Bytes]]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": partial(_plain_signs, high_bits=2),
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": partial(_plain_signs, high_bits=1),
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def _split_signs(blocks: Floats, weights: Floats, even: bool) -> tuple[Floats, NDArray[np.bool_]]:
    """Values of which the levels are positive, and the signs, each (n, 256).

    `even`: of eight weights with an odd number of negative ones, the sign of the one that costs least is
    wrong: its value is negative.
    """
    negative = blocks < 0
    values = np.abs(blocks)
    if even:
        odd = np.flatnonzero(negative.reshape(-1, 8).sum(axis=1) % 2)
        cost = (weights * values * values).reshape(-1, 8)[odd]
        least = cost.argmin(axis=1)
        negative.reshape(-1, 8)[odd, least] ^= True
        values.reshape(-1, 8)[odd, least] *= np.float32(-1)
    return values, negative


def encode_grid(name: str, blocks: Floats, importance: Floats | None) -> Bytes:
    """float32 (n, 256) to blocks of the type `name`, (n, bytes of a block)."""
    spec = FORMATS[name]
    weights = error_weights(blocks, importance, coarse=True)
    weights = weights * reciprocal(weights.mean(axis=1, keepdims=True))
    if spec.grid == "IQ1":
        values, negative = blocks, np.zeros(blocks.shape, np.bool_)
    else:
        values, negative = _split_signs(blocks, weights, even=name in PARITY_TYPES)
    fit = GridSearch(name, values, weights).fit()
    signs = np.packbits(negative, axis=1, bitorder="little")
    return join_fields(spec, _PACKERS[name](fit, signs))


ENCODERS = {name: partial(encode_grid, name) for name in _PACKERS}
