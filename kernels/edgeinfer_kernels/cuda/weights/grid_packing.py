"""Unpacks the IQ types whose levels are rows of a grid, IQ1_S to IQ3_S, with torch operations on the device
of the bytes. The types are described in `codecs/grid_types.py`.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgeinfer_quant_formats.codecs.grid_types import SIGNS
from edgeinfer_quant_formats.formats import FormatSpec
from edgeinfer_quant_formats.grids import GRIDS


class GridCodes(NamedTuple):
    """Of blocks of 256 weights: an index of `Grid.levels` of each weight, (…, 256) uint8; the odd factors of
    16 weights each, (…, 16) int32; the bits of the float16 scale, (…) int32.
    """

    levels: Tensor
    factors: Tensor
    scale: Tensor


class _Parts(NamedTuple):
    """Rows of the grid, (…, rows) int64; the scales s of sub-blocks, (…, 8 or 16); sign bits, (…, bits)."""

    rows: Tensor
    scales: Tensor
    signs: Tensor


def _field(spec: FormatSpec, raw: Tensor, name: str) -> Tensor:
    field = spec.field(name)
    return raw[..., field.offset : field.end].long()


def _words(values: Tensor, nbytes: int) -> Tensor:
    """Bytes as little-endian words."""
    shifts = torch.arange(0, 8 * nbytes, 8, device=values.device)
    return (values.unflatten(-1, (-1, nbytes)) << shifts).sum(-1)


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The `count` lowest fields of each word, lowest first, (…, words · count)."""
    shifts = torch.arange(0, bits * count, bits, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


@cache
def _sign_table(device: torch.device) -> Tensor:
    return torch.from_numpy(SIGNS.astype(np.int64)).to(device)


@cache
def _grid_digits(grid: str, device: torch.device) -> Tensor:
    """The index of each magnitude among `Grid.values`, (rows, columns)."""
    digits = np.searchsorted(GRIDS[grid].values, GRIDS[grid].rows)
    return torch.from_numpy(digits.astype(np.int64)).to(device)


def _coded_signs(words: Tensor) -> Tensor:
    """The sign bits of four codes of seven bits in each word."""
    return _fields(_sign_table(words.device)[_fields(words, 7, 4)], 1, 8)


def _iq2_xxs(spec: FormatSpec, raw: Tensor) -> _Parts:
    qs = _field(spec, raw, "qs").unflatten(-1, (8, 8))
    packed = _words(qs[..., 4:].flatten(-2), 4)
    return _Parts(qs[..., :4].flatten(-2), packed >> 28, _coded_signs(packed))


def _iq2_xs(spec: FormatSpec, raw: Tensor) -> _Parts:
    words = _words(_field(spec, raw, "qs"), 2)
    scales = _fields(_field(spec, raw, "scales"), 4, 2)
    return _Parts(words & 511, scales, _fields(_sign_table(raw.device)[words >> 9], 1, 8))


def _with_upper(spec: FormatSpec, raw: Tensor, bits: int) -> Tensor:
    return _field(spec, raw, "qs") | (_fields(_field(spec, raw, "qh"), bits, 8 // bits) << 8)


def _iq2_s(spec: FormatSpec, raw: Tensor) -> _Parts:
    scales = _fields(_field(spec, raw, "scales"), 4, 2)
    return _Parts(_with_upper(spec, raw, 2), scales, _fields(_field(spec, raw, "signs"), 1, 8))


def _iq3_xxs(spec: FormatSpec, raw: Tensor) -> _Parts:
    packed = _words(_field(spec, raw, "scales"), 4)
    return _Parts(_field(spec, raw, "qs"), packed >> 28, _coded_signs(packed))


def _iq3_s(spec: FormatSpec, raw: Tensor) -> _Parts:
    scales = _fields(_field(spec, raw, "scales"), 4, 2)
    return _Parts(_with_upper(spec, raw, 1), scales, _fields(_field(spec, raw, "signs"), 1, 8))


def _iq1_s(spec: FormatSpec, raw: Tensor) -> _Parts:
    words = _words(_field(spec, raw, "qh"), 2)
    rows = _field(spec, raw, "qs") | (_fields(words, 3, 4) << 8)
    return _Parts(rows, (words >> 12) & 7, (words >> 15).repeat_interleave(4, -1))


def _iq1_m(spec: FormatSpec, raw: Tensor) -> _Parts:
    high = _fields(_field(spec, raw, "qh"), 4, 2)
    rows = _field(spec, raw, "qs") | ((high & 7) << 8)
    return _Parts(rows, _fields(_words(_field(spec, raw, "scales"), 2), 3, 4), high >> 3)


_PARTS: dict[str, Callable[[FormatSpec, Tensor], _Parts]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def _scale_bits(spec: FormatSpec, raw: Tensor) -> Tensor:
    if spec.name != "IQ1_M":
        return _words(_field(spec, raw, "d"), 2).squeeze(-1)
    nibbles = _words(_field(spec, raw, "scales"), 2) >> 12
    return (nibbles << torch.arange(0, 16, 4, device=raw.device)).sum(-1)


def unpack_grid_blocks(spec: FormatSpec, raw: Tensor) -> GridCodes:
    """Blocks (…, bytes of a block) uint8."""
    parts, count = _PARTS[spec.name](spec, raw), len(GRIDS[spec.grid].values)
    digits = _grid_digits(spec.grid, raw.device)[parts.rows].flatten(-2)
    signs = parts.signs.repeat_interleave(digits.shape[-1] // parts.signs.shape[-1], -1)
    if min(GRIDS[spec.grid].values) < 0:  # 8 times the number, minus 1 with the sign
        levels = 2 * digits + 1 - signs
    else:
        levels = torch.where(signs > 0, count - 1 - digits, count + digits)
    factors = (2 * parts.scales + 1).repeat_interleave(16 // parts.scales.shape[-1], -1)
    return GridCodes(levels.to(torch.uint8), factors.int(), _scale_bits(spec, raw).int())
