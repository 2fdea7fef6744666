"""Converts matrices that the CPU stores by neuron (`cpu/layout/neuron_layout.py`) to float16 on the device.

Gate and up: sixteen blocks of 32 columns of one row are interleaved, so a lane is a block. Down: for 32
neurons the factors of all outputs, then neuron by neuron a weight of every output.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.neuron_layout import NEURON_FORMATS, ColumnLayout, row_groups
from edgeinfer_kernels.cpu.runtime.abi import NEURONS_PER_BLOCK, OUTPUTS_PER_TILE

LANES = tl.constexpr(ROWS_PER_GROUP)
NEURONS = tl.constexpr(NEURONS_PER_BLOCK)
TILE = tl.constexpr(OUTPUTS_PER_TILE)


class ColumnOffsets(NamedTuple):
    """A `ColumnLayout` as a compile-time constant."""

    outputs: int
    neuron_bytes: int
    factor_bytes: int
    block_bytes: int
    super_factor_bytes: int
    super_bytes: int
    blocks_per_super: int

    @classmethod
    def of(cls, layout: ColumnLayout) -> "ColumnOffsets":
        return cls(*(getattr(layout, name) for name in cls._fields))


@triton.jit
def _f16(at):
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _signed(code):
    """A byte as a signed number."""
    return (code << 24) >> 24


@triton.jit
def unpack_neuron_rows_kernel(
    raw, out, COLUMNS: tl.constexpr, BLOCK_BYTES: tl.constexpr, FORMAT: tl.constexpr
):
    """out (rows, COLUMNS) float16 = rows of gate or up; program (group of sixteen blocks, row). Fields are
    those of `neuron_rows.py`. Reads a group's bytes once from memory; writes 1,024 bytes at most.
    """
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUPS: tl.constexpr = (COLUMNS + 32 * LANES - 1) // (32 * LANES)
    lane = tl.arange(0, LANES)[:, None]
    column = tl.arange(0, 32)[None, :]
    block = raw + (row * GROUPS + group) * (LANES * BLOCK_BYTES)
    low = column % 16
    if FORMAT == "Q4_0" or FORMAT == "Q8_0":
        CODES: tl.constexpr = 32
    elif FORMAT == "Q4_K":
        CODES: tl.constexpr = 96
    elif FORMAT == "Q5_K":
        CODES: tl.constexpr = 160
    else:
        CODES: tl.constexpr = 64
    d = _f16(block + 2 * lane)
    if FORMAT == "Q8_0":
        code = _signed(tl.load(block + CODES + 64 * (column // 4) + 4 * lane + column % 4).to(tl.int32))
        value = d * code.to(tl.float32)
    else:
        byte = tl.load(block + CODES + 64 * (low // 4) + 4 * lane + low % 4).to(tl.int32)
        code = (byte >> (4 * (column // 16))) & 15
        if FORMAT == "Q4_0":
            value = d * (code - 8).to(tl.float32)
        elif FORMAT == "Q6_K":
            high = tl.load(block + 320 + 64 * (column // 16) + 4 * lane + column % 4).to(tl.int32)
            code = code | (((high >> (2 * (low // 4))) & 3) << 4)
            scale = _signed(tl.load(block + 32 + 16 * (column // 16) + lane).to(tl.int32))
            value = d * scale.to(tl.float32) * (code - 32).to(tl.float32)
        else:
            if FORMAT == "Q5_K":
                fifth = tl.load(block + 96 + 4 * lane + column // 8).to(tl.int32)
                code = code | (((fifth >> (column % 8)) & 1) << 4)
            scale = tl.load(block + 64 + lane).to(tl.float32)
            minimum = _f16(block + 32 + 2 * lane) * tl.load(block + 80 + lane).to(tl.float32)
            value = d * scale * code.to(tl.float32) - minimum
    position = (group * LANES + lane) * 32 + column
    tl.store(out + row * COLUMNS + position, value.to(tl.float16), mask=position < COLUMNS)


@triton.jit
def unpack_neuron_columns_kernel(
    raw, out, OFFSETS: tl.constexpr, BITS: tl.constexpr, FORMAT: tl.constexpr, EXPERT: tl.constexpr
):
    """out (neurons, outputs) float16 = blocks of 32 neurons of down; program (TILE outputs, block). With
    experts of EXPERT neurons (not 0) out is (experts, outputs, EXPERT).

    Output 16k + 4l + i of 64 is byte 16l + 4k + i; low nibbles are outputs 0…63 of TILE, high nibbles the
    others. Reads each byte once from memory; writes 2 bytes per weight.
    """
    OUTPUTS: tl.constexpr = OFFSETS.outputs
    tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    whole = raw + block // OFFSETS.blocks_per_super * OFFSETS.super_bytes
    here = whole + OFFSETS.super_factor_bytes + block % OFFSETS.blocks_per_super * OFFSETS.block_bytes
    neuron = tl.arange(0, NEURONS)[:, None]
    within = tl.arange(0, TILE)[None, :]
    output = tile * TILE + within
    of_64 = within % 64
    byte = 16 * (of_64 % 16 // 4) + 4 * (of_64 // 16) + of_64 % 4
    codes = here + OFFSETS.factor_bytes + neuron * OFFSETS.neuron_bytes
    if BITS == 4:
        code = (tl.load(codes + tile * 64 + byte).to(tl.int32) >> (4 * (within // 64))) & 15
    else:
        code = tl.load(codes + tile * TILE + within // 64 * 64 + byte).to(tl.int32)
    d = _f16(whole + 2 * output)
    if FORMAT == "Q4_0":
        value = d * (code - 8).to(tl.float32)
    elif FORMAT == "Q8_0":
        value = d * _signed(code).to(tl.float32)
    elif FORMAT == "Q6_K":
        scale = _signed(tl.load(here + OUTPUTS * (neuron // 16) + output).to(tl.int32))
        value = d * scale.to(tl.float32) * (code - 32).to(tl.float32)
    else:
        minimum = _f16(whole + 2 * (OUTPUTS + output)) * tl.load(here + OUTPUTS + output).to(tl.float32)
        value = d * tl.load(here + output).to(tl.float32) * code.to(tl.float32) - minimum
    at = block * NEURONS + neuron
    if EXPERT == 0:
        to = out + at * OUTPUTS + output
    else:
        to = out + (at // EXPERT * OUTPUTS + output) * EXPERT + at % EXPERT
    tl.store(to, value.to(tl.float16))


def unpack_neuron_rows(raw: torch.Tensor, format_name: str, out: torch.Tensor) -> None:
    """out (rows, columns) float16 = whole rows of gate or up by neuron, uint8."""
    rows, columns = out.shape
    nbytes = NEURON_FORMATS[format_name].row_block_bytes
    unpack_neuron_rows_kernel[(row_groups(columns), rows)](
        raw, out, COLUMNS=columns, BLOCK_BYTES=nbytes, FORMAT=format_name, num_warps=4
    )


def unpack_neuron_columns(
    raw: torch.Tensor, format_name: str, layout: ColumnLayout, out: torch.Tensor, *, by_expert: bool = False
) -> None:
    """out (neurons, padded outputs) float16 = whole super-blocks of down by neuron, uint8; or `by_expert`,
    (experts · padded outputs, neurons of an expert).
    """
    offsets = ColumnOffsets.of(layout)
    neurons = out.numel() // layout.outputs
    grid = (layout.outputs // OUTPUTS_PER_TILE, neurons // NEURONS_PER_BLOCK)
    unpack_neuron_columns_kernel[grid](
        raw, out, OFFSETS=offsets, BITS=NEURON_FORMATS[format_name].bits, FORMAT=format_name,
        EXPERT=out.shape[1] if by_expert else 0, num_warps=4,
    )  # fmt: skip
