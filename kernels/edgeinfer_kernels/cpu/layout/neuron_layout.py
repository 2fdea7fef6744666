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

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP, Field, split_fields
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.abi import NEURONS_PER_BLOCK, OUTPUTS_PER_TILE
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import Bytes, allocate
from edgeinfer_quant_formats import FORMATS, FormatSpec, block_format
from edgeinfer_quant_formats.codecs.bit_fields import pack_fields, unpack_codes
from edgeinfer_quant_formats.codecs.decoding import SCALE_UNPACKERS

SUB_BLOCKS = 8
MemoryOrder = Literal["groups", "rows", "columns"]
"""How a matrix is stored: sixteen rows interleaved, or by neuron, as gate and up or as down."""


@dataclass(frozen=True)
class Quants:
    """A matrix as the integers of its file: (rows, blocks, 32) codes, and their factors.

    `f16_scales`: float16 factors of a super-block (or of a block, for formats without super-blocks), (rows,
    super-blocks, factors). `bytes`: integer factors of a block, (rows, blocks, factors); empty without.
    """

    codes: Bytes
    f16_scales: npt.NDArray[np.uint16]
    bytes: Bytes


@dataclass(frozen=True)
class NeuronFormat:
    """The per-neuron layout of a format."""

    row_fields: tuple[Field, ...]
    """Fields of the blocks of 32 columns into which a row is split."""
    bits: int
    """Bits of a weight in a column: 4 or 8."""
    f16_scales: int
    bytes: int
    """Factors per output, see `Quants`."""

    @classmethod
    def of(cls, spec: FormatSpec) -> "NeuronFormat":
        """The layout of a format: float16 factors, byte factors, then words of codes."""
        scales = spec.scales
        assert scales is not None
        bits = 4 if spec.bits == 4 else 8
        return cls(split_fields(spec), bits, scales.count, 2 if spec.sub_scales else 0)

    @property
    def row_block_bytes(self) -> int:
        last = self.row_fields[-1]
        return last.offset + last.unit * last.count


NEURON_FORMATS = {name: NeuronFormat.of(FORMATS[name]) for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
"""Formats whose feed-forward can be sparse."""


def read_quants(spec: FormatSpec, raw: Bytes) -> Quants:
    """Blocks of the file (blocks, bytes per block); the rows of the result are blocks of the file."""
    codes = unpack_codes(spec, raw).reshape(len(raw), -1, 32)
    scales = spec.scales
    assert scales is not None
    end = scales.offset + scales.unit * scales.count
    f16_scales = np.ascontiguousarray(raw[:, scales.offset : end]).view("<u2")
    if spec.sub_scales is None:
        return Quants(codes, f16_scales, np.empty((len(raw), 0), np.uint8))
    factors, minima = SCALE_UNPACKERS[spec.sub_scales](spec, raw)
    factors_and_minima = factors if minima is None else np.stack((factors, minima), 2)
    return Quants(codes, f16_scales, factors_and_minima.view(np.uint8).reshape(-1, SUB_BLOCKS, 2))


def row_groups(columns: int) -> int:
    """Groups of sixteen blocks per row of gate or up."""
    return -(-columns // (32 * ROWS_PER_GROUP))


def neuron_row_bytes(matrix: Matrix) -> int:
    """Bytes of a neuron's row of gate or up in this layout."""
    return row_groups(matrix.columns) * ROWS_PER_GROUP * NEURON_FORMATS[matrix.format].row_block_bytes


def lay_out_rows(matrix: Matrix, kernels: Kernels) -> Bytes:
    """Gate or up in the per-neuron layout, (rows · neuron_row_bytes), newly allocated."""
    neuron_format = NEURON_FORMATS[matrix.format]
    blocks = _row_blocks(matrix.format, _file_blocks(matrix)).reshape(
        matrix.rows, -1, neuron_format.row_block_bytes
    )
    missing = row_groups(matrix.columns) * ROWS_PER_GROUP - blocks.shape[1]
    source = np.ascontiguousarray(np.pad(blocks, ((0, 0), (0, missing), (0, 0))) if missing else blocks)
    target = allocate(source.size)
    fields = np.array(
        [(field.offset, field.unit, field.count) for field in neuron_format.row_fields], np.int64
    )
    where = (address(source), address(target), matrix.rows * source.shape[1])
    move = kernels.function("interleave_rows", 9)
    move(*where, 1, neuron_format.row_block_bytes, address(fields), len(fields), 0, 0)
    return target


def _file_blocks(matrix: Matrix) -> Bytes:
    return np.ascontiguousarray(matrix.raw).reshape(-1, block_format(matrix.format).block_bytes)


def _row_blocks(name: str, raw: Bytes) -> Bytes:
    """Blocks of the file as consecutive blocks of 32 columns."""
    if block_format(name).block_elements == 32:
        return raw
    quants = read_quants(FORMATS[name], raw)
    blocks = len(raw) * SUB_BLOCKS
    codes = quants.codes.reshape(blocks, 32)
    f16_scales = np.repeat(quants.f16_scales, SUB_BLOCKS, axis=0).view(np.uint8)
    low = pack_fields(codes & np.uint8(15), 4, 16)
    high = codes >> np.uint8(4)
    parts = [f16_scales, quants.bytes.reshape(blocks, -1)]
    if FORMATS[name].bits == 5:
        parts += [np.packbits(high, axis=1, bitorder="little"), low]
    elif FORMATS[name].bits == 6:
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
    blocks_per_super: int

    @property
    def block_bytes(self) -> int:
        return self.factor_bytes + NEURONS_PER_BLOCK * self.neuron_bytes

    @property
    def super_bytes(self) -> int:
        return self.super_factor_bytes + self.blocks_per_super * self.block_bytes

    @property
    def nbytes(self) -> int:
        return self.blocks // self.blocks_per_super * self.super_bytes

    @classmethod
    def of(cls, matrix: Matrix) -> "ColumnLayout":
        neuron_format = NEURON_FORMATS[matrix.format]
        outputs = -(-matrix.rows // OUTPUTS_PER_TILE) * OUTPUTS_PER_TILE
        return cls(
            outputs=outputs,
            blocks=matrix.columns // NEURONS_PER_BLOCK,
            neuron_bytes=outputs * neuron_format.bits // 8,
            factor_bytes=outputs * neuron_format.bytes,
            super_factor_bytes=2 * outputs * neuron_format.f16_scales,
            blocks_per_super=block_format(matrix.format).block_elements // NEURONS_PER_BLOCK,
        )


def lay_out_columns(matrix: Matrix) -> Bytes:
    """Down in the per-neuron layout, newly allocated."""
    neuron_format, layout = NEURON_FORMATS[matrix.format], ColumnLayout.of(matrix)
    quants = read_quants(FORMATS[matrix.format], _file_blocks(matrix))
    super_blocks, each = layout.blocks // layout.blocks_per_super, layout.blocks_per_super
    target = allocate(layout.nbytes)
    whole = target[: layout.nbytes].reshape(super_blocks, layout.super_bytes)
    f16_scales = _by_output(
        quants.f16_scales.reshape(matrix.rows, super_blocks, neuron_format.f16_scales), layout.outputs
    )
    whole[:, : layout.super_factor_bytes] = f16_scales.view(np.uint8).reshape(super_blocks, -1)
    blocks = whole[:, layout.super_factor_bytes :].reshape(super_blocks, each, layout.block_bytes)
    factors = _by_output(
        quants.bytes.reshape(matrix.rows, layout.blocks, neuron_format.bytes), layout.outputs
    )
    blocks[:, :, : layout.factor_bytes] = factors.reshape(super_blocks, each, layout.factor_bytes)
    codes = _by_output(quants.codes.reshape(matrix.rows, layout.blocks, NEURONS_PER_BLOCK), layout.outputs)
    blocks[:, :, layout.factor_bytes :] = _interleaved_codes(codes, neuron_format.bits).reshape(
        super_blocks, each, -1
    )
    return target


def _by_output(values: npt.NDArray[Any], outputs: int) -> npt.NDArray[Any]:
    """(rows, blocks, n) to (blocks, n, outputs), zero-padded after the rows."""
    rows, blocks, count = values.shape
    padded = np.zeros((blocks, count, outputs), values.dtype)
    padded[:, :, :rows] = values.transpose(1, 2, 0)
    return padded


def _interleaved_codes(codes: Bytes, bits: int) -> Bytes:
    """The codes of whole tiles of outputs in the order of the kernel."""
    shape = codes.shape[:-1]
    ordered = codes.reshape(*shape, -1, 4, 4, 4).swapaxes(-3, -2).reshape(*shape, -1, 64)
    if bits == 4:
        pairs = ordered.reshape(*shape, -1, 2, 64)
        ordered = pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)
    return ordered.reshape(*shape, -1)
