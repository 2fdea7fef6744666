"""Unpacks 32 columns of 16 interleaved rows, for each GGUF block format.

A field of the file's block at byte `offset`, in units of `u` bytes, is at 16·offset, unit after unit, each
unit sixteen rows wide. Offsets of fields (`Q4_0.qs`) and levels are those of the `FormatSpec`; an `unpack`
adds how codes and sub-block scales are stored in bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from edgeinfer_kernels.cpu.layout.fields import interleaved_offsets
from edgeinfer_kernels.cpu.native.gemv.codes import (
    fields,
    fields_with_high_bits,
    nibbles,
    nibbles_with_fifth_bits,
    six_bit_codes,
)
from edgeinfer_kernels.cpu.native.gemv.grid_formats import GRID_UNPACKERS
from edgeinfer_kernels.cpu.native.gemv.rows import RowFormat, rows_of_floats, unsigned_offset
from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    add_i32,
    and_i32,
    bits_of_bytes,
    bits_to_float,
    load_bytes,
    load_ints,
    load_unsigned_bytes,
    load_unsigned_shorts,
    maximum_i32,
    or_i32,
    shift_bytes_left,
    shift_left,
    shift_right,
    signed_byte,
    splat_i32,
    spread_four_bits,
    table_lookup,
    to_float,
    zero_where_equal,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_bfloats,
    load_f16,
    load_floats,
    multiply,
    splat_f32,
)
from edgeinfer_kernels.cpu.native.simd.grid_lanes import spread_four_pairs
from edgeinfer_quant_formats.formats import FORMATS

look_up_iq4 = table_lookup(FORMATS["IQ4_NL"].levels)
look_up_mxfp4 = table_lookup(
    tuple(level + unsigned_offset(FORMATS["MXFP4"]) for level in FORMATS["MXFP4"].levels)
)


Q4_0 = interleaved_offsets("Q4_0")


@device_function
def unpack_q4_0(block, index):
    return (*nibbles(block + Q4_0.qs), load_f16(block + Q4_0.d))


Q4_1 = interleaved_offsets("Q4_1")


@device_function
def unpack_q4_1(block, index):
    minimum = multiply(load_f16(block + Q4_1.m), splat_f32(np.float32(-1)))
    return (*nibbles(block + Q4_1.qs), load_f16(block + Q4_1.d), minimum)


Q5_0 = interleaved_offsets("Q5_0")


@device_function
def unpack_q5_0(block, index):
    return (
        *nibbles_with_fifth_bits(block + Q5_0.qs, load_ints(block + Q5_0.qh)),
        load_f16(block + Q5_0.d),
    )


Q5_1 = interleaved_offsets("Q5_1")


@device_function
def unpack_q5_1(block, index):
    minimum = multiply(load_f16(block + Q5_1.m), splat_f32(np.float32(-1)))
    return (
        *nibbles_with_fifth_bits(block + Q5_1.qs, load_ints(block + Q5_1.qh)),
        load_f16(block + Q5_1.d),
        minimum,
    )


Q8_0 = interleaved_offsets("Q8_0")


@device_function
def unpack_q8_0(block, index):
    q = block + Q8_0.qs
    return (
        load_bytes(q),
        load_bytes(q + 64),
        load_bytes(q + 128),
        load_bytes(q + 192),
        load_bytes(q + 256),
        load_bytes(q + 320),
        load_bytes(q + 384),
        load_bytes(q + 448),
        load_f16(block + Q8_0.d),
    )


@device_function
def iq4_values(quants):
    w = nibbles(quants)
    return (
        look_up_iq4(w[0]),
        look_up_iq4(w[1]),
        look_up_iq4(w[2]),
        look_up_iq4(w[3]),
        look_up_iq4(w[4]),
        look_up_iq4(w[5]),
        look_up_iq4(w[6]),
        look_up_iq4(w[7]),
    )


IQ4_NL = interleaved_offsets("IQ4_NL")


@device_function
def unpack_iq4_nl(block, index):
    return (*iq4_values(block + IQ4_NL.qs), load_f16(block + IQ4_NL.d))


IQ4_XS = interleaved_offsets("IQ4_XS")


@device_function
def unpack_iq4_xs(block, index):
    low = and_i32(shift_right(load_ints(block + IQ4_XS.scales_l), 4 * index), 15)
    high = and_i32(shift_right(load_unsigned_shorts(block + IQ4_XS.scales_h), 2 * index), 3)
    sub_scale = add_i32(or_i32(low, shift_left(high, 4)), splat_i32(types.int32(-32)))
    scale = multiply(load_f16(block + IQ4_XS.d), to_float(sub_scale))
    return (*iq4_values(block + IQ4_XS.qs + 256 * index), scale)


MXFP4 = interleaved_offsets("MXFP4")


@device_function
def unpack_mxfp4(block, index):
    exponent = load_unsigned_bytes(block + MXFP4.e)
    normal = shift_left(add_i32(exponent, splat_i32(types.int32(-1))), 23)
    odd = and_i32(exponent, 1)
    subnormal = add_i32(shift_left(odd, 21), splat_i32(types.int32(1 << 21)))
    scale = bits_to_float(maximum_i32(normal, subnormal))
    w = nibbles(block + MXFP4.qs)
    return (
        look_up_mxfp4(w[0]),
        look_up_mxfp4(w[1]),
        look_up_mxfp4(w[2]),
        look_up_mxfp4(w[3]),
        look_up_mxfp4(w[4]),
        look_up_mxfp4(w[5]),
        look_up_mxfp4(w[6]),
        look_up_mxfp4(w[7]),
        scale,
    )


Q4_K = interleaved_offsets("Q4_K")


@device_function
def six_bit_scale_and_minimum(block, index):
    """Q4_K and Q5_K: sub-block `index`'s scale and minimum, times the block's two float16."""
    s0 = load_ints(block + Q4_K.scales)
    s1 = load_ints(block + Q4_K.scales + 64)
    if index < 4:
        scale = and_i32(shift_right(s0, 8 * index), 63)
        minimum = and_i32(shift_right(s1, 8 * index), 63)
    else:
        byte = 8 * (index - 4)
        s2 = load_ints(block + Q4_K.scales + 128)
        high_scale = shift_left(and_i32(shift_right(s0, byte + 6), 3), 4)
        high_minimum = shift_left(and_i32(shift_right(s1, byte + 6), 3), 4)
        scale = or_i32(and_i32(shift_right(s2, byte), 15), high_scale)
        minimum = or_i32(and_i32(shift_right(s2, byte + 4), 15), high_minimum)
    return (
        multiply(load_f16(block + Q4_K.d), to_float(scale)),
        multiply(load_f16(block + Q4_K.dmin), to_float(minimum)),
    )


@device_function
def unpack_q4_k(block, index):
    quants = block + Q4_K.qs + 512 * (index // 2)
    return (*fields(quants, 4 * (index % 2), 15), *six_bit_scale_and_minimum(block, index))


Q5_K = interleaved_offsets("Q5_K")


@device_function
def unpack_q5_k(block, index):
    quants = block + Q5_K.qs + 512 * (index // 2)
    w = fields_with_high_bits(quants, 4 * (index % 2), 15, block + Q5_K.qh, index, 1, 4)
    return (*w, *six_bit_scale_and_minimum(block, index))


Q6_K = interleaved_offsets("Q6_K")


@device_function
def unpack_q6_k(block, index):
    codes = block + Q6_K.ql + 1536 * (index // 4)
    w = six_bit_codes(codes, codes + 512, codes + 1024, index % 4)
    scales = load_ints(block + Q6_K.scales + 64 * (index // 2))
    first_scale = 2 * (index % 2)
    d = load_f16(block + Q6_K.d)
    return (
        *w,
        multiply(d, to_float(signed_byte(scales, first_scale))),
        multiply(d, to_float(signed_byte(scales, first_scale + 1))),
    )


Q3_K = interleaved_offsets("Q3_K")


@device_function
def q3_k_scale(block, index):
    """Scale `index` of 16: four low bits from bytes 0..7, two high bits from bytes 8..11, with an offset of
    32.
    """
    byte = index % 8
    low = shift_right(load_ints(block + Q3_K.scales + 64 * (byte // 4)), 8 * (byte % 4) + 4 * (index // 8))
    high = shift_right(load_ints(block + Q3_K.scales + 128), 8 * (index % 4) + 2 * (index // 4))
    scale = or_i32(and_i32(low, 15), shift_left(and_i32(high, 3), 4))
    d = load_f16(block + Q3_K.d)
    return multiply(d, to_float(add_i32(scale, splat_i32(types.int32(-32)))))


@device_function
def unpack_q3_k(block, index):
    quants = block + Q3_K.qs + 512 * (index // 4)
    w = fields_with_high_bits(quants, 2 * (index % 4), 3, block + Q3_K.hmask, index, 1, 2)
    return (*w, q3_k_scale(block, 2 * index), q3_k_scale(block, 2 * index + 1))


Q2_K = interleaved_offsets("Q2_K")


@device_function
def unpack_q2_k(block, index):
    scales = load_ints(block + Q2_K.scales + 64 * (index // 2))
    first = 16 * (index % 2)
    d = load_f16(block + Q2_K.d)
    d_minimum = load_f16(block + Q2_K.dmin)
    return (
        *fields(block + Q2_K.qs + 512 * (index // 4), 2 * (index % 4), 3),
        multiply(d, to_float(and_i32(shift_right(scales, first), 15))),
        multiply(d, to_float(and_i32(shift_right(scales, first + 8), 15))),
        multiply(d_minimum, to_float(and_i32(shift_right(scales, first + 4), 15))),
        multiply(d_minimum, to_float(and_i32(shift_right(scales, first + 12), 15))),
    )


Q1_0 = interleaved_offsets("Q1_0")


@device_function
def sign_levels(signs, index):
    """Four columns from bits 4·index… of the row's word `signs`: 0 or 2."""
    return shift_bytes_left(spread_four_bits(shift_right(signs, 4 * index)), 1)


@device_function
def unpack_q1_0(block, index):
    signs = load_ints(block + Q1_0.qs + 64 * index)
    return (
        sign_levels(signs, 0),
        sign_levels(signs, 1),
        sign_levels(signs, 2),
        sign_levels(signs, 3),
        sign_levels(signs, 4),
        sign_levels(signs, 5),
        sign_levels(signs, 6),
        sign_levels(signs, 7),
        load_f16(block + Q1_0.d),
    )


TQ2_0 = interleaved_offsets("TQ2_0")


@device_function
def unpack_tq2_0(block, index):
    return (*fields(block + TQ2_0.qs + 512 * (index // 4), 2 * (index % 4), 3), load_f16(block + TQ2_0.d))


NVFP4 = interleaved_offsets("NVFP4")


@device_function
def half_of_e4m3(bits):
    """An E4M3 number without a sign, halved; 127 is 0."""
    exponent = and_i32(shift_right(bits, 3), 15)
    # 8 for normal numbers, which have a hidden bit; 0 if the exponent is 0.
    hidden_bit = shift_left(and_i32(shift_right(add_i32(exponent, splat_i32(types.int32(15))), 4), 1), 3)
    power = add_i32(maximum_i32(exponent, splat_i32(types.int32(1))), splat_i32(types.int32(116)))
    number = multiply(to_float(or_i32(hidden_bit, and_i32(bits, 7))), bits_to_float(shift_left(power, 23)))
    return zero_where_equal(number, bits, 127)


@device_function
def unpack_nvfp4(block, index):
    x0 = load_bytes(block + NVFP4.qs + 256 * index)
    x1 = load_bytes(block + NVFP4.qs + 256 * index + 64)
    x2 = load_bytes(block + NVFP4.qs + 256 * index + 128)
    x3 = load_bytes(block + NVFP4.qs + 256 * index + 192)
    scales = shift_right(load_ints(block + NVFP4.d), 16 * index)
    return (
        look_up_mxfp4(bits_of_bytes(x0, 0, 15)),
        look_up_mxfp4(bits_of_bytes(x1, 0, 15)),
        look_up_mxfp4(bits_of_bytes(x0, 4, 15)),
        look_up_mxfp4(bits_of_bytes(x1, 4, 15)),
        look_up_mxfp4(bits_of_bytes(x2, 0, 15)),
        look_up_mxfp4(bits_of_bytes(x3, 0, 15)),
        look_up_mxfp4(bits_of_bytes(x2, 4, 15)),
        look_up_mxfp4(bits_of_bytes(x3, 4, 15)),
        half_of_e4m3(and_i32(scales, 255)),
        half_of_e4m3(and_i32(shift_right(scales, 8), 255)),
    )


Q2_0 = interleaved_offsets("Q2_0")


@device_function
def unpack_q2_0(block, index):
    first = load_ints(block + Q2_0.qs + 128 * index)
    last = load_ints(block + Q2_0.qs + 128 * index + 64)
    return (
        spread_four_pairs(first),
        spread_four_pairs(shift_right(first, 8)),
        spread_four_pairs(shift_right(first, 16)),
        spread_four_pairs(shift_right(first, 24)),
        spread_four_pairs(last),
        spread_four_pairs(shift_right(last, 8)),
        spread_four_pairs(shift_right(last, 16)),
        spread_four_pairs(shift_right(last, 24)),
        load_f16(block + Q2_0.d),
    )


UNPACKERS: dict[str, Any] = {
    "Q4_0": unpack_q4_0,
    "Q4_1": unpack_q4_1,
    "Q5_0": unpack_q5_0,
    "Q5_1": unpack_q5_1,
    "Q8_0": unpack_q8_0,
    "Q2_K": unpack_q2_k,
    "Q3_K": unpack_q3_k,
    "Q4_K": unpack_q4_k,
    "Q5_K": unpack_q5_k,
    "Q6_K": unpack_q6_k,
    "IQ4_NL": unpack_iq4_nl,
    "IQ4_XS": unpack_iq4_xs,
    "MXFP4": unpack_mxfp4,
    "TQ2_0": unpack_tq2_0,
    "NVFP4": unpack_nvfp4,
    "Q1_0": unpack_q1_0,
    "Q2_0": unpack_q2_0,
    **GRID_UNPACKERS,
}
ROW_FORMATS = {name: RowFormat.of(FORMATS[name], unpack) for name, unpack in UNPACKERS.items()}
FLOAT_ROW_KERNELS: dict[str, Callable[[], Any]] = {
    "F32": lambda: rows_of_floats(load_floats, 4),
    "F16": lambda: rows_of_floats(load_f16, 2),
    "BF16": lambda: rows_of_floats(load_bfloats, 2),
}
"""Format name -> its GEMV kernel as a Python function, to be compiled for ROW_ARGUMENTS int64."""
