"""Rows of a weight matrix times int8 activations: the arithmetic that all block formats share.

Weights are *interleaved by sixteen rows* (see `cpu/layout/fields.py`): an element of a block of one row is
adjacent to the same element of fifteen other rows. So one vector register holds four columns of sixteen rows,
and one dot instruction advances sixteen outputs. A format only defines its `unpack`: 32 columns of 16 rows as
eight registers of bytes, with their scales (`RowFormat`).

Quantized activations of one token are blocks of 32 columns (`ACTIVATIONS`): int8, their scale s, and sums of
the values for the corrections (written by `quantize.py`).

Formula: output[t, r] = Σ_b scale[r, b]·s[t, b]·(Σ weights·activations) - minimum[r, b]·sum[t, b].

Weights that are stored with an offset need no correction: the dot product starts from -offset·Σ activations,
which the block of activations has. On x86-64, float instructions run on the ports of the dot products, which
limit several tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer_kernels.cpu.native.simd.byte_lanes import add_i32, to_float
from edgeinfer_kernels.cpu.native.simd.dots import (
    SUMS_OF_TOKENS,
    dot_product_of_tokens,
    dot_start,
    dot_sum,
    raise_signed,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function, inline_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract_product,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS
from edgeinfer_quant_formats.formats import FormatSpec

ROW_ARGUMENTS = 10
"""weights, columns, first_row, last_row, activations, activation_stride, tokens, output, output_stride,
scratch.

Addresses and strides in bytes. `first_row` is a multiple of 16; `output` must hold whole groups of 16 rows;
`scratch` is ROWS_SCRATCH of thread-private memory.
"""


COLUMNS_PER_SUM = 64
SUMS_PITCH = 128
"""Bytes between the sums of two tokens of a tile: sixteen rows of each of two groups."""
MAX_UNSIGNED = 127
"""Largest weight that AVX2 and AMX take as an unsigned byte."""


def unsigned_offset(spec: FormatSpec) -> int:
    """What makes all levels of a format unsigned: 0 or a power of two, so that `dot_start` is one shift."""
    lowest = spec.level_range[0]
    return 1 << (-lowest - 1).bit_length() if lowest < 0 else 0


@dataclass(frozen=True)
class RowFormat:
    """The properties of a block format that kernels use.

    `unpack(block, index)` returns the 32 columns of sub-block `index` of sixteen rows: eight registers of
    four columns, `scales` scales (one for 32 columns or two for 16 each), and the same number of minima to
    subtract if it has `minima`. `largest`: upper bound of the weights' magnitudes. Unsigned weights are
    stored with `offset` added.
    """

    unpack: Any
    block_bytes: int
    largest: int
    sub_blocks: int = 1
    scales: int = 1
    signed: bool = False
    offset: int = 0
    minima: bool = False

    @classmethod
    def of(cls, spec: FormatSpec, unpack: Any) -> "RowFormat":
        """The properties of a quantized format. Levels are stored unsigned if they fit 7 bits so."""
        offset = unsigned_offset(spec)
        lowest, highest = spec.level_range
        signed = highest + offset > MAX_UNSIGNED
        return cls(
            unpack,
            spec.block_bytes,
            largest=max(-lowest, highest) if signed else highest + offset,
            sub_blocks=spec.block_elements // 32,
            scales=1 if spec.scale_weights > 16 else 2,
            signed=signed,
            offset=0 if signed else offset,
            minima=spec.has_minimum,
        )

    @property
    def group_bytes(self) -> int:
        """Bytes of a block of sixteen rows."""
        return 16 * self.block_bytes


def unpack_for_dots(row_format: RowFormat, *, inlined: bool = False) -> Any:
    """The format's unpack with weights ready for `dot_sum`: (w0, …, w7, scales…, minima…).

    `inlined`: it is inlined however large it is.
    """
    function = inline_function if inlined else device_function
    unpack = inline_function(row_format.unpack.py_func) if inlined else row_format.unpack
    if not row_format.signed:
        return unpack

    @function
    def raised(block, index):
        u = unpack(block, index)
        return (
            raise_signed(u[0]),
            raise_signed(u[1]),
            raise_signed(u[2]),
            raise_signed(u[3]),
            raise_signed(u[4]),
            raise_signed(u[5]),
            raise_signed(u[6]),
            raise_signed(u[7]),
            u[8],
        )

    return raised


@device_function
def broadcast(activations, offset):
    return splat_f32(load_f32(activations + offset))


@device_function
def of_each_lane(activations, offset):
    return load_floats(activations + 16 * offset)


def make_accumulate(row_format: RowFormat, *, by_lanes: bool = False, of_32: Any = None) -> Any:
    """`accumulate(unpacked, activations, total)`: adds the product of 32 columns, as unpacked by
    `unpack_for_dots`, with one token's block of activations to `total`.

    `by_lanes`: every lane has a different block of activations, sixteen of them interleaved by words. `of_32`
    replaces the `dot_sum` of 32 columns.
    """
    if row_format.scales == 2:
        return make_accumulate_16(row_format, by_lanes=by_lanes)
    signed, minima, factor = row_format.signed, row_format.minima, of_each_lane if by_lanes else broadcast
    start = dot_start("all", row_format.offset, signed=signed, by_lanes=by_lanes)
    of_32 = of_32 or dot_sum(8, signed=signed, largest=row_format.largest, by_lanes=by_lanes)

    @device_function
    def accumulate_32(u, a, total):
        sums = of_32(start(a), u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], a)
        total = multiply_add(to_float(sums), multiply(u[8], factor(a, ACTIVATIONS.scale)), total)
        if minima:
            total = subtract_product(u[9], factor(a, ACTIVATIONS.sum), total)
        return total

    return accumulate_32


def make_accumulate_16(row_format: RowFormat, *, by_lanes: bool) -> Any:
    """`accumulate` for formats with two scales."""
    signed, minima, factor = row_format.signed, row_format.minima, of_each_lane if by_lanes else broadcast
    start_first, start_last = (
        dot_start(columns, row_format.offset, signed=signed, by_lanes=by_lanes)
        for columns in ("first", "last")
    )
    of_16 = dot_sum(4, signed=signed, largest=row_format.largest, by_lanes=by_lanes)
    half = 256 if by_lanes else 16

    @device_function
    def accumulate_16(u, a, total):
        first = of_16(start_first(a), u[0], u[1], u[2], u[3], a)
        last = of_16(start_last(a), u[4], u[5], u[6], u[7], a + half)
        weighted = multiply_add(to_float(last), u[9], multiply(to_float(first), u[8]))
        total = multiply_add(weighted, factor(a, ACTIVATIONS.scale), total)
        if minima:
            total = subtract_product(u[10], factor(a, ACTIVATIONS.first_sum), total)
            total = subtract_product(u[11], factor(a, ACTIVATIONS.last_sum), total)
        return total

    return accumulate_16


def make_accumulate_tokens(row_format: RowFormat) -> Any:
    """`accumulate_tokens(unpacked, activations, stride, sums)`: as `accumulate` for FOUR_TOKENS tokens, whose
    totals are SUMS_PITCH bytes apart at `sums`. For formats with one scale; unsigned weights are below 128.
    """
    of_32 = dot_product_of_tokens(8, largest=row_format.largest)
    add_0, add_1, add_2, add_3 = (make_add_sums(row_format, sums) for sums in SUMS_OF_TOKENS)

    @device_function
    def accumulate_tokens(u, a, stride, at):
        x = of_32(u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], a, stride)
        sums = (x, x, x, x, x, x, x, x, *u[8:])
        add_0(sums, a, at)
        add_1(sums, a + stride, at + SUMS_PITCH)
        add_2(sums, a + 2 * stride, at + 2 * SUMS_PITCH)
        add_3(sums, a + 3 * stride, at + 3 * SUMS_PITCH)

    return accumulate_tokens


def make_add_sums(row_format: RowFormat, sums_of_token: Any) -> Any:
    """`add_sums(unpacked, activations, total)`: `accumulate` with the finished sums of several tokens in
    place of the weights; `sums_of_token` picks those of one token. Adds to the total at an address.
    """

    @device_function
    def of_32(total, x0, x1, x2, x3, x4, x5, x6, x7, at):
        return add_i32(total, sums_of_token(x0))

    accumulate = make_accumulate(row_format, of_32=of_32)

    @device_function
    def add_sums(u, a, at):
        store_floats(at, accumulate(u, a, load_floats(at)))

    return add_sums


def rows_of_floats(load_column: Any, element_bytes: int) -> Callable[..., None]:
    """The GEMV kernel for unquantized weights; activations are float32 rows; columns are a multiple of
    four. Sums of COLUMNS_PER_SUM columns are added up, which loses fewer bits than one sum.
    """
    column_bytes = 16 * element_bytes

    def rows(
        weights, columns, first_row, last_row, activations, stride, tokens, output, output_stride, scratch
    ):
        for index in range(first_row // 16, (last_row + 15) // 16):
            group = weights + index * columns * column_bytes
            for token in range(tokens):
                x = activations + token * stride
                total = splat_f32(np.float32(0))
                for begin in range(0, columns, COLUMNS_PER_SUM):
                    t0 = splat_f32(np.float32(0))
                    t1 = splat_f32(np.float32(0))
                    t2 = splat_f32(np.float32(0))
                    t3 = splat_f32(np.float32(0))
                    for column in range(begin, min(columns, begin + COLUMNS_PER_SUM), 4):
                        w = group + column * column_bytes
                        a = x + 4 * column
                        t0 = multiply_add(load_column(w), splat_f32(load_f32(a)), t0)
                        t1 = multiply_add(load_column(w + column_bytes), splat_f32(load_f32(a + 4)), t1)
                        t2 = multiply_add(load_column(w + 2 * column_bytes), splat_f32(load_f32(a + 8)), t2)
                        t3 = multiply_add(load_column(w + 3 * column_bytes), splat_f32(load_f32(a + 12)), t3)
                    total = add(total, add(add(t0, t1), add(t2, t3)))
                store_floats(output + token * output_stride + 64 * index, total)

    return rows
