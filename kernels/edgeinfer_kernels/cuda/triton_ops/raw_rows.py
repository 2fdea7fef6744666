"""Weights decoded from rows as they are in the file, for kernels that read few rows of a table."""

from typing import NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.words import level_words
from edgeinfer_kernels.sizes.cuda_matrices import reads_raw_rows
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.formats import CodeBits, SubScales

NO_PLACE = -1
_FLOATS = ("F32", "F16", "BF16")
_SUB_SCALES = (
    SubScales.SIX_BITS_AND_MINIMA,
    SubScales.NIBBLES_AND_MINIMA,
    SubScales.SIX_BITS,
    SubScales.BYTES,
    SubScales.SPLIT_SIX_BITS,
)
_SIX_BITS_AND_MINIMA = tl.constexpr(0)
_NIBBLES_AND_MINIMA = tl.constexpr(1)
_SIX_BITS = tl.constexpr(2)
_BYTES = tl.constexpr(3)


class RawConfig(NamedTuple):
    """A row of the file: its bytes, the weights and bytes of a block, and where the fields of a block are.

    element: bytes of a number that isn't quantized, else 0; brain: as bfloat16. low, high: where the parts of
    codes are, their bits (0: there is no such part) and group as in `CodeBits`; high_shift: its first bit.
    levels: a codebook as four words, or level = step · code - offset. minimum: a number that is added to
    weights, or with sub-block scales one whose multiple is subtracted; sub_scales: the index of their kind;
    NO_PLACE: there are none.
    """

    row_bytes: int
    weights: int
    nbytes: int
    element: int = 0
    brain: bool = False
    low: int = 0
    low_bits: int = 0
    low_group: int = 1
    high: int = 0
    high_bits: int = 0
    high_group: int = 1
    high_shift: int = 0
    signed: bool = False
    step: int = 1
    offset: int = 0
    levels: tuple[int, ...] | None = None
    scale: int = 0
    minimum: int = NO_PLACE
    sub_scales: int = NO_PLACE
    sub_scales_at: int = 0
    upper_scales_at: int = 0


def raw_config(format_name: str, columns: int) -> RawConfig | None:
    """The configuration of rows of a format; None: kernels can't decode them."""
    if not reads_raw_rows(format_name):
        return None
    spec = block_format(format_name)
    row_bytes = spec.row_bytes(columns)
    if spec.name in _FLOATS:
        return RawConfig(row_bytes, 1, spec.block_bytes, spec.block_bytes, spec.name == "BF16")
    places = {field.name: field.offset for field in spec.fields}
    low, *upper = spec.codes
    high = upper[0] if upper else CodeBits(low.field, 0, 1)
    return RawConfig(
        row_bytes,
        spec.block_elements,
        spec.block_bytes,
        low=places[low.field],
        low_bits=low.bits,
        low_group=low.group,
        high=places[high.field],
        high_bits=high.bits,
        high_group=high.group,
        high_shift=high.shift,
        signed=spec.signed,
        step=spec.step,
        offset=spec.offset,
        levels=level_words(spec.levels) if spec.levels else None,
        scale=places["d"],
        minimum=places.get("m", places.get("dmin", NO_PLACE)),
        sub_scales=NO_PLACE if spec.sub_scales is None else _SUB_SCALES.index(spec.sub_scales),
        sub_scales_at=places.get("scales", places.get("scales_l", 0)),
        upper_scales_at=places.get("scales_h", 0),
    )


@triton.jit
def _byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _short(at, mask):
    return _byte(at, mask) | (_byte(at + 1, mask) << 8)


@triton.jit
def _half(at, mask):
    return _short(at, mask).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _code_bits(field, element, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """A part of each element's code, from the bytes of a field."""
    FIELDS: tl.constexpr = 8 // BITS
    within = element % (GROUP * FIELDS)
    byte = _byte(field + element // (GROUP * FIELDS) * GROUP + within % GROUP, mask)
    return (byte >> (within // GROUP * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _level(block, element, mask, RAW: tl.constexpr):
    code = _code_bits(block + RAW.low, element, mask, RAW.low_bits, RAW.low_group)
    if RAW.high_bits > 0:
        high = _code_bits(block + RAW.high, element, mask, RAW.high_bits, RAW.high_group)
        code |= high << RAW.high_shift
    if RAW.levels is not None:
        words = tl.where(code < 4, RAW.levels[0], tl.where(code < 8, RAW.levels[1], RAW.levels[2]))
        words = tl.where(code < 12, words, RAW.levels[3])
        code = (words >> (8 * (code % 4))) & 255
    if RAW.signed or RAW.levels is not None:
        code = (code ^ 128) - 128
    return (RAW.step * code - RAW.offset).to(tl.float32)


@triton.jit
def _sub_scales(block, element, mask, RAW: tl.constexpr):
    """The scale and the minimum of each element's sub-block, int32."""
    at = block + RAW.sub_scales_at
    if RAW.sub_scales == _SIX_BITS_AND_MINIMA:
        sub = element // 32
        early = sub < 4
        own, late = _byte(at + sub % 4, mask), _byte(at + 4 + sub % 4, mask)
        shared = _byte(at + 8 + sub % 4, mask)
        scale = tl.where(early, own & 63, (shared & 15) | (own >> 6 << 4))
        return scale, tl.where(early, late & 63, (shared >> 4) | (late >> 6 << 4))
    elif RAW.sub_scales == _NIBBLES_AND_MINIMA:
        byte = _byte(at + element // 16, mask)
        return byte & 15, byte >> 4
    elif RAW.sub_scales == _SIX_BITS:
        sub = element // 16
        low = (_byte(at + sub % 8, mask) >> (sub // 8 * 4)) & 15
        scale = low | (((_byte(at + 8 + sub % 4, mask) >> (sub // 4 * 2)) & 3) << 4)
        return scale - 32, scale * 0
    elif RAW.sub_scales == _BYTES:
        scale = (_byte(at + element // 16, mask) ^ 128) - 128
        return scale, scale * 0
    else:
        sub = element // 32
        low = (_byte(at + sub // 2, mask) >> (sub % 2 * 4)) & 15
        upper = (_short(block + RAW.upper_scales_at, mask) >> (2 * sub)) & 3
        return (low | (upper << 4)) - 32, low * 0


@triton.jit
def decode_raw(row, column, mask, RAW: tl.constexpr):
    """The weights of these columns of a row of the file, float32.

    `row`: the address of its first byte. A weight reads 2 to 9 bytes; those next to it share most of them.
    """
    block = row + column // RAW.weights * RAW.nbytes
    if RAW.element == 4:
        return (_short(block, mask) | (_short(block + 2, mask) << 16)).to(tl.float32, bitcast=True)
    elif RAW.brain:
        return (_short(block, mask) << 16).to(tl.float32, bitcast=True)
    elif RAW.element == 2:
        return _half(block, mask)
    else:
        element = column % RAW.weights
        level, scale = _level(block, element, mask, RAW), _half(block + RAW.scale, mask)
        if RAW.sub_scales < 0:
            value = scale * level
            if RAW.minimum >= 0:
                value += _half(block + RAW.minimum, mask)
            return value
        sub_scale, sub_minimum = _sub_scales(block, element, mask, RAW)
        value = scale * sub_scale.to(tl.float32) * level
        if RAW.minimum >= 0:
            value -= _half(block + RAW.minimum, mask) * sub_minimum.to(tl.float32)
        return value
