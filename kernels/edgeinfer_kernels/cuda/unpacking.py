"""Rows as the host's kernels have them, sixteen interleaved, to plain float16 on the device, for any format.

The layout is `edgeinfer_kernels.cpu.layout`'s: unit u of a block's field at byte `offset`, `unit` bytes wide,
lies for row r of the group at 16 · (block · block bytes + offset + u · unit) + r · unit.
"""

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.cpu.layout import ROWS_A_GROUP
from edgeinfer_quant_formats import block_format

ROWS = tl.constexpr(ROWS_A_GROUP)
STEP = 256
"""Columns that a program unpacks."""
IQ4 = tl.constexpr(0)
FP4 = tl.constexpr(1)


@triton.jit
def _half(block, row, AT: tl.constexpr):
    """The float16 at byte AT of each weight's block, float32."""
    return tl.load((block + ROWS * AT + 2 * row).to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _byte(block, row, AT: tl.constexpr, index):
    """Byte `index` of a field of words that begins at byte AT, int32."""
    return tl.load(block + ROWS * (AT + (index & -4)) + 4 * row + (index & 3)).to(tl.int32)


@triton.jit
def _signed_byte(block, row, AT: tl.constexpr, index):
    return (_byte(block, row, AT, index) << 24) >> 24


@triton.jit
def _level(code, BOOK: tl.constexpr):
    """The level of a 4-bit code: of IQ4, or twice that of FP4."""
    if BOOK == IQ4:  # -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
        low = tl.where(code < 4, -1079142271, -152379953)
        high = tl.where(code < 12, 639175937, 1901675829)
    else:  # 0 1 2 3, 4 6 8 12, 0 -1 -2 -3, -4 -6 -8 -12
        low = tl.where(code < 4, 50462976, 201852420)
        high = tl.where(code < 12, -33620224, -185009412)
    word = tl.where(code < 8, low, high)
    return (word << (24 - 8 * (code & 3))) >> 24


@triton.jit
def _nibble(block, row, AT: tl.constexpr, e):
    """Weight e of 32: bytes' low halves, then their high ones."""
    return (_byte(block, row, AT, e % 16) >> (4 * (e // 16))) & 15


@triton.jit
def _simple(block, row, e, FORMAT: tl.constexpr):
    """Blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL."""
    d = _half(block, row, 0)
    if FORMAT == "Q4_0":
        return d * (_nibble(block, row, 2, e) - 8).to(tl.float32)
    elif FORMAT == "Q4_1":
        return d * _nibble(block, row, 4, e).to(tl.float32) + _half(block, row, 2)
    elif FORMAT == "Q5_0":
        fifth = (_byte(block, row, 2, e // 8) >> (e % 8)) & 1
        return d * ((_nibble(block, row, 6, e) | (fifth << 4)) - 16).to(tl.float32)
    elif FORMAT == "Q5_1":
        fifth = (_byte(block, row, 4, e // 8) >> (e % 8)) & 1
        return d * (_nibble(block, row, 8, e) | (fifth << 4)).to(tl.float32) + _half(block, row, 2)
    elif FORMAT == "Q8_0":
        return d * _signed_byte(block, row, 2, e).to(tl.float32)
    else:
        return d * _level(_nibble(block, row, 2, e), IQ4).to(tl.float32)


@triton.jit
def _k_minimum(block, row, e, FIFTH: tl.constexpr):
    """Q4_K, or Q5_K with its FIFTH bits: 6-bit scales and minima of 32 weights each."""
    part = e // 32
    one = _byte(block, row, 4, part % 4)
    two = _byte(block, row, 4, 4 + part % 4)
    three = _byte(block, row, 4, 8 + part % 4)
    early = part < 4
    scale = tl.where(early, one & 63, (three & 15) | ((one >> 6) << 4))
    minimum = tl.where(early, two & 63, (three >> 4) | ((two >> 6) << 4))
    index = 32 * (part // 2) + e % 32
    if FIFTH:
        code = (_byte(block, row, 48, index) >> (4 * (part % 2))) & 15
        code = code | (((_byte(block, row, 16, e % 32) >> part) & 1) << 4)
    else:
        code = (_byte(block, row, 16, index) >> (4 * (part % 2))) & 15
    lowest = _half(block, row, 2) * minimum.to(tl.float32)
    return _half(block, row, 0) * scale.to(tl.float32) * code.to(tl.float32) - lowest


@triton.jit
def _two_bits(block, row, AT: tl.constexpr, e):
    """The two bits of weight e of 256: of each 32 bytes the lowest, then the next."""
    return (_byte(block, row, AT, 32 * (e // 128) + e % 32) >> (2 * ((e % 128) // 32))) & 3


@triton.jit
def _q2_k(block, row, e):
    scales = _byte(block, row, 0, e // 16)
    step = _half(block, row, 80) * (scales & 15).to(tl.float32)
    return step * _two_bits(block, row, 16, e).to(tl.float32) - _half(block, row, 82) * (scales >> 4).to(
        tl.float32
    )


@triton.jit
def _q3_k(block, row, e):
    third = (_byte(block, row, 0, e % 32) >> (e // 32)) & 1
    code = (_two_bits(block, row, 32, e) | (third << 2)) - 4
    part = e // 16
    low = (_byte(block, row, 96, part % 8) >> (4 * (part // 8))) & 15
    high = (_byte(block, row, 96, 8 + part % 4) >> (2 * (part // 4))) & 3
    return _half(block, row, 108) * ((low | (high << 4)) - 32).to(tl.float32) * code.to(tl.float32)


@triton.jit
def _q6_k(block, row, e):
    quarter = (e % 128) // 32
    low = _byte(block, row, 0, 64 * (e // 128) + 32 * (quarter % 2) + e % 32) >> (4 * (quarter // 2))
    code = ((low & 15) | (_two_bits(block, row, 128, e) << 4)) - 32
    scale = _signed_byte(block, row, 192, e // 16)
    return _half(block, row, 208) * scale.to(tl.float32) * code.to(tl.float32)


@triton.jit
def _iq4_xs(block, row, e):
    part = e // 32
    upper = tl.load((block + ROWS * 2 + 2 * row).to(tl.pointer_type(tl.uint16))).to(tl.int32)
    low = (_byte(block, row, 4, part // 2) >> (4 * (part % 2))) & 15
    scale = (low | (((upper >> (2 * part)) & 3) << 4)) - 32
    code = (_byte(block, row, 8, 16 * part + e % 16) >> (4 * ((e % 32) // 16))) & 15
    return _half(block, row, 0) * scale.to(tl.float32) * _level(code, IQ4).to(tl.float32)


@triton.jit
def _mxfp4(block, row, e):
    """2^(e8 - 128) times twice the level, e8 being the first byte; as float32 the power may be subnormal."""
    power = tl.load(block + row).to(tl.int32)
    scale = tl.where(power < 2, 0x200000 << power, (power - 1) << 23).to(tl.float32, bitcast=True)
    code = (_byte(block, row, 1, e % 16) >> (4 * (e // 16))) & 15
    return scale * _level(code, FP4).to(tl.float32)


@triton.jit
def _weight(block, row, e, FORMAT: tl.constexpr):
    """Weight e of the blocks of a row that begin at `block`, float32."""
    if FORMAT == "Q4_K":
        return _k_minimum(block, row, e, False)
    elif FORMAT == "Q5_K":
        return _k_minimum(block, row, e, True)
    elif FORMAT == "Q2_K":
        return _q2_k(block, row, e)
    elif FORMAT == "Q3_K":
        return _q3_k(block, row, e)
    elif FORMAT == "Q6_K":
        return _q6_k(block, row, e)
    elif FORMAT == "IQ4_XS":
        return _iq4_xs(block, row, e)
    elif FORMAT == "MXFP4":
        return _mxfp4(block, row, e)
    else:
        return _simple(block, row, e, FORMAT)


@triton.jit
def _float(group, row, column, FORMAT: tl.constexpr):
    """A weight of a format of floats, float32."""
    place = ROWS * column + row
    if FORMAT == "F32":
        return tl.load(group.to(tl.pointer_type(tl.float32)) + place)
    elif FORMAT == "F16":
        return tl.load(group.to(tl.pointer_type(tl.float16)) + place).to(tl.float32)
    else:
        word = tl.load(group.to(tl.pointer_type(tl.uint16)) + place).to(tl.int32) << 16
        return word.to(tl.float32, bitcast=True)


@triton.jit
def unpack_kernel(
    raw,
    out,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    STEP: tl.constexpr,
):
    """out (16 · groups, COLUMNS) float16 = groups of sixteen rows at `raw`; program (STEP columns, group).

    Reads a group's bytes once from memory, its bytes of several weights again from cache; writes 2 a weight.
    """
    column = tl.program_id(0) * STEP + tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    inside = (column < COLUMNS)[None, :]
    column = tl.minimum(column, COLUMNS - 1)[None, :]
    begin = raw + group * GROUP_BYTES
    if BLOCK == 1:
        value = _float(begin, row[:, None], column, FORMAT)
    else:
        block = begin + ROWS * BLOCK_BYTES * (column // BLOCK)
        value = _weight(block, row[:, None], column % BLOCK, FORMAT)
    to = out + (group * ROWS + row[:, None]) * COLUMNS + column
    tl.store(to, value.to(tl.float16), mask=inside)


def unpack(raw: torch.Tensor, format_name: str, columns: int, group_bytes: int, out: torch.Tensor) -> None:
    """out (rows, columns) float16 = rows, a multiple of sixteen, that lie interleaved in raw (bytes,) uint8.

    `group_bytes`: bytes of sixteen rows.
    """
    form = block_format(format_name)
    groups = len(out) // ROWS_A_GROUP
    unpack_kernel[(triton.cdiv(columns, STEP), groups)](
        raw, out, COLUMNS=columns, BLOCK=form.block_elements, BLOCK_BYTES=form.block_bytes,
        GROUP_BYTES=group_bytes, FORMAT=format_name, STEP=min(STEP, triton.next_power_of_2(columns)),
        num_warps=8,
    )  # fmt: skip
