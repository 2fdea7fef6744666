"""The layouts of a sparse feed-forward: gate and up by row, down by column. The weights of a neuron are
contiguous, so those of inactive neurons are not read.

Rows of gate and up are split into blocks of 32 columns. Sixteen blocks of one row are interleaved, as sixteen
rows are in other matrices (`fields.py`). The last sixteen of a row are zero-padded. Super-blocks are split
into blocks of 32 that each have a copy of the super-block's float16 factors.

Down: for 32 neurons, first the factors of their weights, output by output (`ColumnLayout`), then neuron by
neuron one weight per output. Eight such blocks of a super-block follow its float16 factors. Outputs are
zero-padded to 128; 64 of them are ordered so that the bytes of four neurons interleave by `punpckl`: output
16k + 4l + i is byte 16l + 4k + i; low nibbles hold outputs 0…63 of 128, high nibbles the others.

Both layouts keep the integers and factors of the file, so the dequantized values are bit-identical.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.fields import FIELDS, ROWS_PER_GROUP, Field
from edgeinfer_kernels.cpu.layout.packed_matrix import Bytes, address, allocate
from edgeinfer_kernels.cpu.runtime.abi import NEURONS_PER_BLOCK, OUTPUTS_PER_TILE
from edgeinfer_kernels.weights import Matrix
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.codecs.bit_fields import pack_fields, unpack_fields
from edgeinfer_quant_formats.codecs.k_quants import unpack_scales_and_minima

SUB_BLOCKS = 8


@dataclass(frozen=True)
class Quants:
    """A matrix as the integers of its file: (rows, blocks, 32) codes, and their factors.

    `halves`: float16 factors of a super-block (or of a block, for formats without super-blocks), (rows,
    supers, factors). `bytes`: integer factors of a block, (rows, blocks, factors); empty if blocks have none.
    """

    codes: Bytes
    halves: npt.NDArray[np.uint16]
    bytes: Bytes


@dataclass(frozen=True)
class NeuronFormat:
    """The per-neuron layout of a format."""

    read: Callable[[Bytes], Quants]
    """From (rows·blocks of the file, bytes per block); the rows of the result are blocks of the file."""
    row_fields: tuple[Field, ...]
    """Fields of the blocks of 32 columns into which a row is split."""
    bits: int
    """Bits of a weight in a column: 4 or 8."""
    halves: int
    bytes: int
    """Factors per output, see `Quants`."""

    @property
    def row_block_bytes(self) -> int:
        last = self.row_fields[-1]
        return last.offset + last.unit * last.count


def _no_bytes(blocks: int) -> Bytes:
    return np.empty((blocks, 0), np.uint8)


def _read_q4_0(raw: Bytes) -> Quants:
    codes = unpack_fields(raw[:, 2:], 4, 16)[:, None]
    return Quants(codes, _halves(raw[:, :2]), _no_bytes(len(raw)))


def _read_q8_0(raw: Bytes) -> Quants:
    return Quants(raw[:, None, 2:], _halves(raw[:, :2]), _no_bytes(len(raw)))


def _read_q4_k(raw: Bytes) -> Quants:
    codes = unpack_fields(raw[:, 16:], 4, 32).reshape(-1, SUB_BLOCKS, 32)
    return Quants(codes, _halves(raw[:, :4]), np.stack(unpack_scales_and_minima(raw[:, 4:16]), 2))


def _read_q5_k(raw: Bytes) -> Quants:
    codes = unpack_fields(raw[:, 16:48], 1, 32) << np.uint8(4) | unpack_fields(raw[:, 48:], 4, 32)
    factors = np.stack(unpack_scales_and_minima(raw[:, 4:16]), 2)
    return Quants(codes.reshape(-1, SUB_BLOCKS, 32), _halves(raw[:, :4]), factors)


def _read_q6_k(raw: Bytes) -> Quants:
    codes = unpack_fields(raw[:, 128:192], 2, 32) << np.uint8(4) | unpack_fields(raw[:, :128], 4, 64)
    factors = raw[:, 192:208].reshape(-1, SUB_BLOCKS, 2)
    return Quants(codes.reshape(-1, SUB_BLOCKS, 32), _halves(raw[:, 208:210]), factors)


def _halves(raw: Bytes) -> npt.NDArray[np.uint16]:
    return np.ascontiguousarray(raw).view("<u2")


def _fields(*parts: tuple[int, int]) -> tuple[Field, ...]:
    """Consecutive fields, from (unit, count)."""
    starts = np.cumsum([0, *(unit * count for unit, count in parts)])
    return tuple(Field(int(start), *part) for start, part in zip(starts, parts, strict=False))


NEURON_FORMATS: dict[str, NeuronFormat] = {
    "Q4_0": NeuronFormat(_read_q4_0, FIELDS["Q4_0"], 4, 1, 0),
    "Q8_0": NeuronFormat(_read_q8_0, FIELDS["Q8_0"], 8, 1, 0),
    "Q4_K": NeuronFormat(_read_q4_k, _fields((2, 2), (1, 2), (4, 4)), 4, 2, 2),
    "Q5_K": NeuronFormat(_read_q5_k, _fields((2, 2), (1, 2), (4, 5)), 8, 2, 2),
    "Q6_K": NeuronFormat(_read_q6_k, _fields((2, 1), (1, 2), (4, 6)), 8, 1, 2),
}
"""Formats whose feed-forward can be sparse."""


def row_groups(columns: int) -> int:
    """Groups of sixteen blocks per row of gate or up."""
    return -(-columns // (32 * ROWS_PER_GROUP))


def neuron_row_bytes(matrix: Matrix) -> int:
    """Bytes of a neuron's row of gate or up in this layout."""
    return row_groups(matrix.columns) * ROWS_PER_GROUP * NEURON_FORMATS[matrix.format].row_block_bytes


def lay_out_rows(matrix: Matrix, kernels: Kernels) -> Bytes:
    """Gate or up in the per-neuron layout, (rows · neuron_row_bytes), newly allocated."""
    form = NEURON_FORMATS[matrix.format]
    blocks = _row_blocks(matrix.format, _file_blocks(matrix)).reshape(matrix.rows, -1, form.row_block_bytes)
    missing = row_groups(matrix.columns) * ROWS_PER_GROUP - blocks.shape[1]
    source = np.ascontiguousarray(np.pad(blocks, ((0, 0), (0, missing), (0, 0))) if missing else blocks)
    target = allocate(source.size)
    fields = np.array([(field.offset, field.unit, field.count) for field in form.row_fields], np.int64)
    where = (address(source), address(target), matrix.rows * source.shape[1])
    move = kernels.function("interleave_rows", 9)
    move(*where, 1, form.row_block_bytes, address(fields), len(fields), 0, 0)
    return target


def _file_blocks(matrix: Matrix) -> Bytes:
    return np.ascontiguousarray(matrix.raw).reshape(-1, block_format(matrix.format).block_bytes)


def _row_blocks(name: str, raw: Bytes) -> Bytes:
    """Blocks of the file as consecutive blocks of 32 columns."""
    if block_format(name).block_elements == 32:
        return raw
    quants = NEURON_FORMATS[name].read(raw)
    blocks = len(raw) * SUB_BLOCKS
    codes = quants.codes.reshape(blocks, 32)
    halves = np.repeat(quants.halves, SUB_BLOCKS, axis=0).view(np.uint8)
    low = pack_fields(codes & np.uint8(15), 4, 16)
    high = codes >> np.uint8(4)
    parts = [halves, quants.bytes.reshape(blocks, -1)]
    if name == "Q5_K":
        parts += [np.packbits(high, axis=1, bitorder="little"), low]
    elif name == "Q6_K":
        parts += [low, pack_fields(high, 2, 4)]
    else:
        parts.append(low)
    return np.hstack(parts)


@dataclass(frozen=True)
class ColumnLayout:
    """Offsets within a down projection in the per-neuron layout; lengths in bytes."""

    outputs: int
    """Padded to OUTPUTS_PER_TILE."""
    blocks: int
    """Number of blocks of 32 neurons."""
    neuron_bytes: int
    """Bytes of one neuron: a weight per output."""
    factor_bytes: int
    """Factors of a block, stored before its neurons; if there are several factors, in the super-block."""
    super_factor_bytes: int
    blocks_a_super: int

    @property
    def block_bytes(self) -> int:
        return self.factor_bytes + NEURONS_PER_BLOCK * self.neuron_bytes

    @property
    def super_bytes(self) -> int:
        return self.super_factor_bytes + self.blocks_a_super * self.block_bytes

    @property
    def nbytes(self) -> int:
        return self.blocks // self.blocks_a_super * self.super_bytes

    @classmethod
    def of(cls, matrix: Matrix) -> "ColumnLayout":
        form = NEURON_FORMATS[matrix.format]
        outputs = -(-matrix.rows // OUTPUTS_PER_TILE) * OUTPUTS_PER_TILE
        return cls(
            outputs=outputs,
            blocks=matrix.columns // NEURONS_PER_BLOCK,
            neuron_bytes=outputs * form.bits // 8,
            factor_bytes=outputs * form.bytes,
            super_factor_bytes=2 * outputs * form.halves,
            blocks_a_super=block_format(matrix.format).block_elements // NEURONS_PER_BLOCK,
        )


def lay_out_columns(matrix: Matrix) -> Bytes:
    """Down in the per-neuron layout, newly allocated."""
    form, layout = NEURON_FORMATS[matrix.format], ColumnLayout.of(matrix)
    quants = form.read(_file_blocks(matrix))
    supers, each = layout.blocks // layout.blocks_a_super, layout.blocks_a_super
    target = allocate(layout.nbytes)
    whole = target[: layout.nbytes].reshape(supers, layout.super_bytes)
    halves = _by_output(quants.halves.reshape(matrix.rows, supers, form.halves), layout.outputs)
    whole[:, : layout.super_factor_bytes] = halves.view(np.uint8).reshape(supers, -1)
    blocks = whole[:, layout.super_factor_bytes :].reshape(supers, each, layout.block_bytes)
    factors = _by_output(quants.bytes.reshape(matrix.rows, layout.blocks, form.bytes), layout.outputs)
    blocks[:, :, : layout.factor_bytes] = factors.reshape(supers, each, layout.factor_bytes)
    codes = _by_output(quants.codes.reshape(matrix.rows, layout.blocks, NEURONS_PER_BLOCK), layout.outputs)
    blocks[:, :, layout.factor_bytes :] = _woven(codes, form.bits).reshape(supers, each, -1)
    return target


def _by_output(values: npt.NDArray[Any], outputs: int) -> npt.NDArray[Any]:
    """(rows, blocks, n) to (blocks, n, outputs), zero-padded after the rows."""
    rows, blocks, count = values.shape
    found = np.zeros((blocks, count, outputs), values.dtype)
    found[:, :, :rows] = values.transpose(1, 2, 0)
    return found


def _woven(codes: Bytes, bits: int) -> Bytes:
    """The codes of whole tiles of outputs in the order of the kernel."""
    shape = codes.shape[:-1]
    ordered = codes.reshape(*shape, -1, 4, 4, 4).swapaxes(-3, -2).reshape(*shape, -1, 64)
    if bits == 4:
        pairs = ordered.reshape(*shape, -1, 2, 64)
        ordered = pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)
    return ordered.reshape(*shape, -1)
