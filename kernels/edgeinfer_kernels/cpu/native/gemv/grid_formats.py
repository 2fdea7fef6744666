"""Unpacks 32 columns of 16 interleaved rows, for the IQ types whose levels are rows of a grid.

A row of a grid is looked up by gather, four or eight columns at once. As in `row_formats.py`; how codes,
signs and scales are stored is that of `codecs/grid_types.py`.
"""

from typing import Any

import numpy as np
from numba import types

from edgeinfer_kernels.cpu.layout.fields import interleaved_offsets
from edgeinfer_kernels.cpu.native.gemv.rows import unsigned_offset
from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    add_i32,
    and_i32,
    load_ints,
    or_i32,
    shift_left,
    shift_right,
    splat_i32,
    to_float,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import f16_of_bits, load_f16, multiply, splat_f32
from edgeinfer_kernels.cpu.native.simd.grid_lanes import (
    first_words,
    pair_lookup,
    second_words,
    signed_above,
    two_more_unless,
    with_parity_bit,
    word_lookup,
)
from edgeinfer_quant_formats.formats import FORMATS
from edgeinfer_quant_formats.grids import GRIDS


def _grid_words(grid: str, step: int = 1, offset: int = 0) -> list[int]:
    """The rows of a grid as words of four bytes, step·magnitude + offset."""
    levels = GRIDS[grid].rows * np.int8(step) + np.int8(offset)
    words: list[int] = np.ascontiguousarray(levels).reshape(-1).view("<i4").tolist()
    return words


@device_function
def plus_one(x):
    return add_i32(x, splat_i32(types.int32(1)))


@device_function
def byte_of(word, index):
    """Byte `index` of each lane."""
    return and_i32(shift_right(word, 8 * index), 255)


@device_function
def short_of(word, index):
    """Half `index` of each lane, 16 bits."""
    return and_i32(shift_right(word, 16 * index), 65535)


@device_function
def odd_scale(d, code, unit):
    """unit·d·(2·code + 1)."""
    return multiply(multiply(d, splat_f32(unit)), to_float(plus_one(shift_left(code, 1))))


def _eight_columns(name: str) -> Any:
    """`eight(row, signs)`: the levels of a row of eight columns with eight sign bits, as two registers."""
    look_up = pair_lookup(f"grid_{name}", _grid_words(FORMATS[name].grid))
    signed = signed_above(unsigned_offset(FORMATS[name]))

    @device_function
    def eight(row, signs):
        found = look_up(row)
        return signed(first_words(found), signs), signed(second_words(found), shift_right(signs, 4))

    return eight


def _four_columns(name: str) -> Any:
    """`four(row, signs)`: the levels of a row of four columns with four sign bits."""
    look_up = word_lookup(f"grid_{name}", _grid_words(FORMATS[name].grid))
    signed = signed_above(unsigned_offset(FORMATS[name]))

    @device_function
    def four(row, signs):
        return signed(look_up(row), signs)

    return four


EIGHTH, QUARTER, ONE = np.float32(1 / 8), np.float32(1 / 4), np.float32(1)

IQ2_XXS = interleaved_offsets("IQ2_XXS")
iq2_xxs_row = _eight_columns("IQ2_XXS")


@device_function
def unpack_iq2_xxs(block, index):
    rows = load_ints(block + IQ2_XXS.qs + 128 * index)
    packed = load_ints(block + IQ2_XXS.qs + 128 * index + 64)
    return (
        *iq2_xxs_row(byte_of(rows, 0), with_parity_bit(and_i32(packed, 127))),
        *iq2_xxs_row(byte_of(rows, 1), with_parity_bit(and_i32(shift_right(packed, 7), 127))),
        *iq2_xxs_row(byte_of(rows, 2), with_parity_bit(and_i32(shift_right(packed, 14), 127))),
        *iq2_xxs_row(byte_of(rows, 3), with_parity_bit(and_i32(shift_right(packed, 21), 127))),
        odd_scale(load_f16(block + IQ2_XXS.d), shift_right(packed, 28), EIGHTH),
    )


IQ2_XS = interleaved_offsets("IQ2_XS")
iq2_xs_row = _eight_columns("IQ2_XS")


@device_function
def iq2_xs_columns(packed):
    """Eight columns from the 9 bits of a row and the 7 of its signs."""
    return iq2_xs_row(and_i32(packed, 511), with_parity_bit(shift_right(packed, 9)))


@device_function
def nibble_scales(scales, d, index):
    """The two scales of sub-block `index`, from the nibbles of a byte of `scales`."""
    byte = byte_of(load_ints(scales + 64 * (index // 4)), index % 4)
    return odd_scale(d, and_i32(byte, 15), EIGHTH), odd_scale(d, shift_right(byte, 4), EIGHTH)


@device_function
def unpack_iq2_xs(block, index):
    first = load_ints(block + IQ2_XS.qs + 128 * index)
    last = load_ints(block + IQ2_XS.qs + 128 * index + 64)
    return (
        *iq2_xs_columns(short_of(first, 0)),
        *iq2_xs_columns(short_of(first, 1)),
        *iq2_xs_columns(short_of(last, 0)),
        *iq2_xs_columns(short_of(last, 1)),
        *nibble_scales(block + IQ2_XS.scales, load_f16(block + IQ2_XS.d), index),
    )


IQ2_S = interleaved_offsets("IQ2_S")
iq2_s_row = _eight_columns("IQ2_S")


@device_function
def iq2_s_columns(rows, high, signs, index):
    """Eight columns from byte `index` of `rows`, two bits of `high` and byte `index` of `signs`."""
    upper = and_i32(shift_right(high, 2 * index), 3)
    return iq2_s_row(or_i32(byte_of(rows, index), shift_left(upper, 8)), byte_of(signs, index))


@device_function
def unpack_iq2_s(block, index):
    rows = load_ints(block + IQ2_S.qs + 64 * index)
    signs = load_ints(block + IQ2_S.signs + 64 * index)
    high = byte_of(load_ints(block + IQ2_S.qh + 64 * (index // 4)), index % 4)
    return (
        *iq2_s_columns(rows, high, signs, 0),
        *iq2_s_columns(rows, high, signs, 1),
        *iq2_s_columns(rows, high, signs, 2),
        *iq2_s_columns(rows, high, signs, 3),
        *nibble_scales(block + IQ2_S.scales, load_f16(block + IQ2_S.d), index),
    )


IQ3_XXS = interleaved_offsets("IQ3_XXS")
iq3_xxs_row = _four_columns("IQ3_XXS")


@device_function
def iq3_xxs_columns(rows, packed, index):
    """Eight columns from bytes `index` and `index` + 1 of `rows` and seven sign bits."""
    signs = with_parity_bit(and_i32(packed, 127))
    first = iq3_xxs_row(byte_of(rows, index), signs)
    return first, iq3_xxs_row(byte_of(rows, index + 1), shift_right(signs, 4))


@device_function
def unpack_iq3_xxs(block, index):
    first = load_ints(block + IQ3_XXS.qs + 128 * index)
    last = load_ints(block + IQ3_XXS.qs + 128 * index + 64)
    packed = load_ints(block + IQ3_XXS.scales + 64 * index)
    return (
        *iq3_xxs_columns(first, packed, 0),
        *iq3_xxs_columns(first, shift_right(packed, 7), 2),
        *iq3_xxs_columns(last, shift_right(packed, 14), 0),
        *iq3_xxs_columns(last, shift_right(packed, 21), 2),
        odd_scale(load_f16(block + IQ3_XXS.d), shift_right(packed, 28), QUARTER),
    )


IQ3_S = interleaved_offsets("IQ3_S")
iq3_s_row = _four_columns("IQ3_S")


@device_function
def iq3_s_columns(rows, high, signs, index):
    """Four columns from byte `index` of `rows`, with a ninth bit and four sign bits at bit 0."""
    return iq3_s_row(or_i32(byte_of(rows, index), shift_left(and_i32(high, 1), 8)), signs)


@device_function
def unpack_iq3_s(block, index):
    first = load_ints(block + IQ3_S.qs + 128 * index)
    last = load_ints(block + IQ3_S.qs + 128 * index + 64)
    high = byte_of(load_ints(block + IQ3_S.qh + 64 * (index // 4)), index % 4)
    signs = load_ints(block + IQ3_S.signs + 64 * index)
    scale = and_i32(shift_right(load_ints(block + IQ3_S.scales), 4 * index), 15)
    return (
        iq3_s_columns(first, high, signs, 0),
        iq3_s_columns(first, shift_right(high, 1), shift_right(signs, 4), 1),
        iq3_s_columns(first, shift_right(high, 2), shift_right(signs, 8), 2),
        iq3_s_columns(first, shift_right(high, 3), shift_right(signs, 12), 3),
        iq3_s_columns(last, shift_right(high, 4), shift_right(signs, 16), 0),
        iq3_s_columns(last, shift_right(high, 5), shift_right(signs, 20), 1),
        iq3_s_columns(last, shift_right(high, 6), shift_right(signs, 24), 2),
        iq3_s_columns(last, shift_right(high, 7), shift_right(signs, 28), 3),
        odd_scale(load_f16(block + IQ3_S.d), scale, ONE),
    )


look_up_iq1 = pair_lookup(
    "grid_IQ1", _grid_words("IQ1", step=8, offset=unsigned_offset(FORMATS["IQ1_S"]) - 1)
)


@device_function
def iq1_columns(rows, upper, negative, index):
    """Eight columns from byte `index` of `rows` and three upper bits: 8·number ± 1, plus 16."""
    row = or_i32(byte_of(rows, index), shift_left(and_i32(upper, 7), 8))
    found = look_up_iq1(row)
    return (
        two_more_unless(first_words(found), negative),
        two_more_unless(second_words(found), negative),
    )


IQ1_S = interleaved_offsets("IQ1_S")


@device_function
def unpack_iq1_s(block, index):
    rows = load_ints(block + IQ1_S.qs + 64 * index)
    high = short_of(load_ints(block + IQ1_S.qh + 64 * (index // 2)), index % 2)
    negative = shift_right(high, 15)
    return (
        *iq1_columns(rows, high, negative, 0),
        *iq1_columns(rows, shift_right(high, 3), negative, 1),
        *iq1_columns(rows, shift_right(high, 6), negative, 2),
        *iq1_columns(rows, shift_right(high, 9), negative, 3),
        odd_scale(load_f16(block + IQ1_S.d), and_i32(shift_right(high, 12), 7), EIGHTH),
    )


IQ1_M = interleaved_offsets("IQ1_M")


@device_function
def iq1_m_factor(block):
    """The block's float16, from the top nibbles of four shorts."""
    low, high = load_ints(block + IQ1_M.scales), load_ints(block + IQ1_M.scales + 64)
    first = or_i32(and_i32(shift_right(low, 12), 15), and_i32(shift_right(low, 24), 240))
    last = or_i32(and_i32(shift_right(high, 12), 15), and_i32(shift_right(high, 24), 240))
    return f16_of_bits(or_i32(first, shift_left(last, 8)))


@device_function
def iq1_m_columns(rows, high, index):
    """Eight columns from byte `index` of `rows` and nibble `index` of `high`: upper bits and a sign."""
    nibble = shift_right(high, 4 * index)
    return iq1_columns(rows, nibble, and_i32(nibble, 8), index)


@device_function
def unpack_iq1_m(block, index):
    rows = load_ints(block + IQ1_M.qs + 64 * index)
    high = short_of(load_ints(block + IQ1_M.qh + 64 * (index // 2)), index % 2)
    word = load_ints(block + IQ1_M.scales + 64 * (index // 4))
    scales = shift_right(short_of(word, index // 2 % 2), 6 * (index % 2))
    d = iq1_m_factor(block)
    return (
        *iq1_m_columns(rows, high, 0),
        *iq1_m_columns(rows, high, 1),
        *iq1_m_columns(rows, high, 2),
        *iq1_m_columns(rows, high, 3),
        odd_scale(d, and_i32(scales, 7), EIGHTH),
        odd_scale(d, and_i32(shift_right(scales, 3), 7), EIGHTH),
    )


GRID_UNPACKERS: dict[str, Any] = {
    "IQ1_S": unpack_iq1_s,
    "IQ1_M": unpack_iq1_m,
    "IQ2_XXS": unpack_iq2_xxs,
    "IQ2_XS": unpack_iq2_xs,
    "IQ2_S": unpack_iq2_s,
    "IQ3_XXS": unpack_iq3_xxs,
    "IQ3_S": unpack_iq3_s,
}
