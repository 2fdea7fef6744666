"""Converts rows in the CPU kernel layout, interleaved by sixteen, to float16 on the device, for any format.

The layout is that of `cpu/layout/fields.py`: unit u of a block's field at byte `offset`, `unit` bytes wide,
is at 16 · (block · block bytes + offset + u · unit) + r · unit for row r of the group; the codes of Q6_K are
packed again. A program processes words of codes, which hold 4 to 16 weights of a row each: four adjacent
ones, or a multiple.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cuda.triton_ops.words import FP4_WORDS, IQ4_WORDS, half_of_e4m3
from edgeinfer_quant_formats.formats import KERNEL_FORMATS

ROWS = tl.constexpr(ROWS_PER_GROUP)
WORDS = 64
"""Words of codes per row that a program unpacks."""
FLOATS_PER_PROGRAM = 256
"""Elements per row and program, for float formats."""


class BlockLayout(NamedTuple):
    """The byte offsets of a block's fields, as a compile-time constant."""

    weights: int
    nbytes: int
    words: int
    """Words of codes, without upper bits."""
    codes: int
    upper: int
    scales: int
    """Byte offset of the packed sub-block scales."""
    d: int
    minimum: int
    """Byte offset of the second float16."""


@cache
def block_layout(format_name: str) -> BlockLayout:
    """The facts of a format with codes."""
    spec = KERNEL_FORMATS[format_name]
    offsets = {field.name: field.offset for field in spec.fields}
    codes = spec.field(spec.codes[0].field)
    upper = spec.field(spec.codes[-1].field).offset
    scales = offsets.get("scales", offsets.get("scales_l", 0))
    d = offsets.get("d", 0)
    minimum = offsets.get("m", offsets.get("dmin", 0))
    words = codes.count // 4
    return BlockLayout(spec.block_elements, spec.block_bytes, words, codes.offset, upper, scales, d, minimum)


@triton.jit
def _f16(block, row, AT: tl.constexpr):
    """The float16 at byte AT of a block, as float32."""
    return tl.load((block + ROWS * AT + 2 * row).to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _word(block, row, AT: tl.constexpr, index):
    """Word `index` of a field that starts at byte AT."""
    return tl.load((block + ROWS * AT + 64 * index + 4 * row).to(tl.pointer_type(tl.int32)))


@triton.jit
def _byte(block, row, AT: tl.constexpr, index):
    """Byte `index` of a field of words that starts at byte AT, int32."""
    return tl.load(block + ROWS * (AT + (index & -4)) + 4 * row + (index & 3)).to(tl.int32)


@triton.jit
def _level(code, FP4: tl.constexpr):
    """The level of a 4-bit code: for IQ4, or twice that of FP4."""
    if FP4:
        low = tl.where(code < 4, FP4_WORDS[0], FP4_WORDS[1])
        high = tl.where(code < 12, FP4_WORDS[2], FP4_WORDS[3])
    else:
        low = tl.where(code < 4, IQ4_WORDS[0], IQ4_WORDS[1])
        high = tl.where(code < 12, IQ4_WORDS[2], IQ4_WORDS[3])
    word = tl.where(code < 8, low, high)
    return (word << (24 - 8 * (code & 3))) >> 24


@triton.jit
def _store(out, column, value, inside):
    tl.store(out + column, value.to(tl.float16), mask=inside)


@triton.jit
def _simple(out, block, row, i, k, inside, LAYOUT: tl.constexpr, FORMAT: tl.constexpr):
    """Blocks of 32 in nibbles: word i holds weights 4i… in the low nibbles of its bytes, 16 + 4i… in the high
    nibbles.

    Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4. For MXFP4 the scale is 2^(first byte - 128), because levels are
    doubled.
    """
    if FORMAT == "MXFP4":
        power = tl.load(block + row).to(tl.int32)
        d = tl.where(power < 2, 0x200000 << power, (power - 1) << 23).to(tl.float32, bitcast=True)
    else:
        d = _f16(block, row, LAYOUT.d)
    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        lowest = _f16(block, row, LAYOUT.minimum)
    if FORMAT == "Q5_0" or FORMAT == "Q5_1":
        fifth = _word(block, row, LAYOUT.upper, 0)
    word = _word(block, row, LAYOUT.codes, i)
    for half in tl.static_range(2):
        code = (word >> (8 * k + 4 * half)) & 15
        if FORMAT == "Q5_0" or FORMAT == "Q5_1":
            code = code | (((fifth >> (16 * half + 4 * i + k)) & 1) << 4)
        if FORMAT == "Q4_0":
            value = d * (code - 8).to(tl.float32)
        elif FORMAT == "Q5_0":
            value = d * (code - 16).to(tl.float32)
        elif FORMAT == "Q4_1" or FORMAT == "Q5_1":
            value = d * code.to(tl.float32) + lowest
        else:
            value = d * _level(code, FORMAT == "MXFP4").to(tl.float32)
        _store(out, 16 * half + 4 * i + k, value, inside)


@triton.jit
def _q8_0(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    word = _word(block, row, LAYOUT.codes, i)
    code = (word << (24 - 8 * k)) >> 24
    _store(out, 4 * i + k, _f16(block, row, LAYOUT.d) * code.to(tl.float32), inside)


@triton.jit
def _k_minimum(out, block, row, i, k, inside, LAYOUT: tl.constexpr, FIFTH: tl.constexpr):
    """Q4_K, or Q5_K with its FIFTH bits: of each 32 bytes first the low nibbles, then the high nibbles; 6-bit
    scales and minima of 32 weights each.
    """
    pair, at = i >> 3, 4 * (i & 7) + k
    word = _word(block, row, LAYOUT.codes, i)
    if FIFTH:
        fifth = _word(block, row, LAYOUT.upper, i & 7) >> (8 * k)
    scales, minima = _word(block, row, LAYOUT.scales, 0), _word(block, row, LAYOUT.scales, 1)
    high_bits = _word(block, row, LAYOUT.scales, 2)
    d, lowest = _f16(block, row, LAYOUT.d), _f16(block, row, LAYOUT.minimum)
    for half in tl.static_range(2):
        part = 2 * pair + half
        shift, early = 8 * (part & 3), part < 4
        one, two, three = (scales >> shift) & 255, (minima >> shift) & 255, (high_bits >> shift) & 255
        scale = tl.where(early, one & 63, (three & 15) | ((one >> 6) << 4))
        minimum = tl.where(early, two & 63, (three >> 4) | ((two >> 6) << 4))
        code = (word >> (8 * k + 4 * half)) & 15
        if FIFTH:
            code = code | (((fifth >> part) & 1) << 4)
        value = (d * scale.to(tl.float32)) * code.to(tl.float32) - lowest * minimum.to(tl.float32)
        _store(out, 64 * pair + 32 * half + at, value, inside)


@triton.jit
def _q6_k(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    """Of each half of 128 weights the bytes of three quarters, in whose top two bits is the fourth, lowest
    bits first (`pack_six_bits`); int8 scales for 16.
    """
    side, second, at = i >> 4, (i >> 3) & 1, i & 7
    at_word = 24 * side + at
    first = (_word(block, row, LAYOUT.codes, at_word) >> (8 * k)) & 255
    middle = (_word(block, row, LAYOUT.codes, at_word + 8) >> (8 * k)) & 255
    third = (_word(block, row, LAYOUT.codes, at_word + 16) >> (8 * k)) & 255
    fourth = (first >> 6) | ((middle >> 6) << 2) | ((third >> 6) << 4)
    d = _f16(block, row, LAYOUT.d)
    for half in tl.static_range(2):
        quarter = second + 2 * half
        if half == 0:
            code = tl.where(second == 0, first, middle) & 63
        else:
            code = tl.where(second == 0, third & 63, fourth)
        scale = (_byte(block, row, LAYOUT.scales, 8 * side + 2 * quarter + (at >> 2)) << 24) >> 24
        value = d * scale.to(tl.float32) * (code - 32).to(tl.float32)
        _store(out, 128 * side + 32 * quarter + 4 * at + k, value, inside)


@triton.jit
def _two_bits(out, block, row, i, k, inside, LAYOUT: tl.constexpr, THIRD: tl.constexpr):
    """Q2_K, or Q3_K with its THIRD bits: of each 32 bytes the lowest two bits, then the next two."""
    side, at = i >> 3, i & 7
    word = _word(block, row, LAYOUT.codes, i)
    if THIRD:
        third = _word(block, row, LAYOUT.upper, at) >> (8 * k)
    d = _f16(block, row, LAYOUT.d)
    if not THIRD:
        lowest = _f16(block, row, LAYOUT.minimum)
    for quarter in tl.static_range(4):
        code = (word >> (8 * k + 2 * quarter)) & 3
        part = 8 * side + 2 * quarter + (at >> 2)
        if THIRD:
            code = (code | (((third >> (4 * side + quarter)) & 1) << 2)) - 4
            low = (_byte(block, row, LAYOUT.scales, part & 7) >> (4 * (part >> 3))) & 15
            high = (_byte(block, row, LAYOUT.scales, 8 + (part & 3)) >> (2 * (part >> 2))) & 3
            value = d * ((low | (high << 4)) - 32).to(tl.float32) * code.to(tl.float32)
        else:
            scales = _byte(block, row, LAYOUT.scales, part)
            value = d * (scales & 15).to(tl.float32) * code.to(tl.float32)
            value = value - lowest * (scales >> 4).to(tl.float32)
        _store(out, 128 * side + 32 * quarter + 4 * at + k, value, inside)


@triton.jit
def _signs(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    """Q1_0: byte k of word i holds the signs of weights 32i + 8k…; a set bit is +d."""
    byte, d = _word(block, row, LAYOUT.codes, i) >> (8 * k), _f16(block, row, LAYOUT.d)
    for bit in tl.static_range(8):
        _store(out, 32 * i + 8 * k + bit, d * (2 * ((byte >> bit) & 1) - 1).to(tl.float32), inside)


@triton.jit
def _ternary(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    """TQ2_0: of each 32 bytes the lowest two bits, then the next two; one scale for all."""
    side, at = i >> 3, i & 7
    word, d = _word(block, row, LAYOUT.codes, i), _f16(block, row, LAYOUT.d)
    for quarter in tl.static_range(4):
        code = ((word >> (8 * k + 2 * quarter)) & 3) - 1
        _store(out, 128 * side + 32 * quarter + 4 * at + k, d * code.to(tl.float32), inside)


@triton.jit
def _four_codes(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    """Q2_0: byte k of word i holds weights 16i + 4k…, two bits each; one scale for all."""
    byte, d = _word(block, row, LAYOUT.codes, i) >> (8 * k), _f16(block, row, LAYOUT.d)
    for quarter in tl.static_range(4):
        code = ((byte >> (2 * quarter)) & 3) - 1
        _store(out, 16 * i + 4 * k + quarter, d * code.to(tl.float32), inside)


@triton.jit
def _nvfp4(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    """Of each 8 bytes, which have an E4M3 scale without a sign (127 is 0), first the low nibbles."""
    part = i >> 1
    word = _word(block, row, LAYOUT.codes, i)
    number = (_word(block, row, LAYOUT.d, 0) >> (8 * part)) & 255
    scale = tl.where(number == 127, 0.0, half_of_e4m3(number, 0))
    for half in tl.static_range(2):
        code = (word >> (8 * k + 4 * half)) & 15
        _store(out, 16 * part + 8 * half + 4 * (i & 1) + k, scale * _level(code, True).to(tl.float32), inside)


@triton.jit
def _iq4_xs(out, block, row, i, k, inside, LAYOUT: tl.constexpr):
    part, at = i >> 2, i & 3
    word = _word(block, row, LAYOUT.codes, i)
    upper = tl.load((block + ROWS * 2 + 2 * row).to(tl.pointer_type(tl.uint16))).to(tl.int32)
    low = (_word(block, row, LAYOUT.scales, 0) >> (4 * part)) & 15
    scale = (low | (((upper >> (2 * part)) & 3) << 4)) - 32
    step = _f16(block, row, LAYOUT.d) * scale.to(tl.float32)
    for half in tl.static_range(2):
        code = (word >> (8 * k + 4 * half)) & 15
        value = step * _level(code, False).to(tl.float32)
        _store(out, 32 * part + 16 * half + 4 * at + k, value, inside)


@triton.jit
def unpack_kernel(
    raw,
    out,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    FORMAT: tl.constexpr,
    STEP: tl.constexpr,
):
    """out (16 · groups, COLUMNS) float16 = groups of sixteen rows at `raw`; program (STEP of a row's words of
    codes, group). A block has FACTS.words such words.

    Reads a group's bytes once from memory, scales again from cache; writes 2 bytes per weight.
    """
    BLOCKS: tl.constexpr = COLUMNS // LAYOUT.weights
    CODES: tl.constexpr = LAYOUT.words
    BLOCK_BYTES: tl.constexpr = LAYOUT.nbytes
    word = (tl.program_id(0) * STEP + tl.arange(0, STEP))[None, :, None]
    row = tl.arange(0, ROWS)[:, None, None]
    k = tl.arange(0, 4)[None, None, :]
    inside = word < BLOCKS * CODES
    word = tl.minimum(word, BLOCKS * CODES - 1)
    number, i = word // CODES, word % CODES
    group = tl.program_id(1).to(tl.int64)
    block = raw + group * (ROWS * BLOCK_BYTES * BLOCKS) + ROWS * BLOCK_BYTES * number
    to = out + group * (ROWS * COLUMNS) + row * COLUMNS + number * LAYOUT.weights
    if FORMAT == "Q8_0":
        _q8_0(to, block, row, i, k, inside, LAYOUT)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        _k_minimum(to, block, row, i, k, inside, LAYOUT, FORMAT == "Q5_K")
    elif FORMAT == "Q6_K":
        _q6_k(to, block, row, i, k, inside, LAYOUT)
    elif FORMAT == "Q2_K" or FORMAT == "Q3_K":
        _two_bits(to, block, row, i, k, inside, LAYOUT, FORMAT == "Q3_K")
    elif FORMAT == "IQ4_XS":
        _iq4_xs(to, block, row, i, k, inside, LAYOUT)
    elif FORMAT == "Q1_0":
        _signs(to, block, row, i, k, inside, LAYOUT)
    elif FORMAT == "TQ2_0":
        _ternary(to, block, row, i, k, inside, LAYOUT)
    elif FORMAT == "Q2_0":
        _four_codes(to, block, row, i, k, inside, LAYOUT)
    elif FORMAT == "NVFP4":
        _nvfp4(to, block, row, i, k, inside, LAYOUT)
    else:
        _simple(to, block, row, i, k, inside, LAYOUT, FORMAT)


@triton.jit
def unpack_floats_kernel(raw, out, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """The same for float16, bfloat16 or float32, with pointers of that type; program (STEP columns,
    group).
    """
    column = tl.program_id(0) * STEP + tl.arange(0, STEP)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    inside = (column < COLUMNS) & (row < ROWS)
    group = tl.program_id(1).to(tl.int64) * (ROWS * COLUMNS)
    value = tl.load(raw + group + ROWS * column + row, mask=inside, other=0.0)
    tl.store(out + group + row * COLUMNS + column, value.to(tl.float16), mask=inside)


FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def unpack(raw: torch.Tensor, format_name: str, columns: int, out: torch.Tensor) -> None:
    """out (rows, columns) float16 = rows, a multiple of sixteen, that are interleaved in `raw`, uint8."""
    groups = len(out) // ROWS_PER_GROUP
    if format_name in FLOATS:
        step = min(FLOATS_PER_PROGRAM, 1 << (columns - 1).bit_length())
        unpack_floats_kernel[(-(-columns // step), groups)](
            raw.view(FLOATS[format_name]), out, COLUMNS=columns, STEP=step
        )
        return
    layout = block_layout(format_name)
    words = columns // layout.weights * layout.words
    unpack_kernel[(-(-words // WORDS), groups)](
        raw, out, COLUMNS=columns, LAYOUT=layout, FORMAT=format_name, STEP=WORDS, num_warps=8
    )
