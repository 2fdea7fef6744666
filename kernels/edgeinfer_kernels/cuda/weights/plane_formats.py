"""The layout of quantized rows on the device: planes of 32-bit words, one word of each plane for 32 weights.

A thread can thus read adjacent blocks of a row with 16-byte loads, without byte shifts. The blocks of a row
are *permuted*: block b is at index (b % 8)·(blocks/8) + b//8. So the data of eight blocks of a 256-weight
super-block is contiguous too. Rows are zero-padded to 16, blocks to 16.

    words   (rows, planes, blocks)     the codes of the weights
    scales  (rows/2, blocks)           16 bits per block, row 2i in the low bits, row 2i + 1 in the high bits;
            (rows, blocks)             32 bits per block (`Scale.PAIR`)
    super_scales  (rows/2, blocks/8)         one float16 for 256 weights, paired by rows (`Scale.SIGNED`);
            (rows, blocks/8)           two float16: scale and minimum (`Scale.MINIMUM`, `Scale.SHORT`)
            (rows, 1)                  a float32 factor of the row (`Scale.E4M3`)
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from edgeinfer_quant_formats.formats import FORMATS, KERNEL_FORMATS, MULTIPLIED_FORMATS, FormatSpec
from edgeinfer_quant_formats.grids import GRIDS

ROW_MULTIPLE = 16
BLOCK_MULTIPLE = 16
BLOCK = 32
"""Weights per block, independent of the block size in the file."""


class Code(IntEnum):
    """Encoding of the 32 weights of a block in words; e is the element, i = e % 4 its byte."""

    NIBBLE = 0
    """Word j: elements 4j… in the low nibbles of its bytes, 16 + 4j… in the high nibbles."""
    NIBBLE_1 = 1
    """NIBBLE, and word 4: the fifth bit of element 4j + i at byte i, bit j; of 16 + 4j + i at bit 4 + j."""
    NIBBLE_2 = 2
    """NIBBLE, and words 4, 5: two more bits of element 4j + i (16 + 4j + i) at byte i, bits 2j."""
    BYTE = 3
    """Word j: elements 4j… as int8."""
    CODEBOOK = 4
    """Word j: elements 4j… as nibbles of its low 16 bits, 16 + 4j… of its high 16 bits: ready for `prmt`."""
    HALF = 5
    """Word j: elements 2j, 2j + 1 as float16."""
    BRAIN = 6
    """Word j: elements 2j, 2j + 1 as bfloat16."""
    SINGLE = 7
    """Word j: element j as float32."""


class Scale(IntEnum):
    """Meaning of the scales."""

    NONE = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    PAIR = 3
    """float16 scale, float16 minimum that is added."""
    MINIMUM = 4
    """uint8 scale, uint8 minimum, for 32 weights; super_scales hold their float16 factors. The minimum is
    subtracted.
    """
    SIGNED = 5
    """int8 scale of the first 16 weights, int8 of the others; super_scales hold their float16 factor."""
    SHORT = 6
    """4 bits each: scale of the first 16, of the others, minimum of the first 16, of the others."""
    E4M3 = 7
    """Twice the scale of the first 16 weights, and of the others, as E4M3 numbers without a sign;
    super_scales hold a float32 factor of each row.
    """


class Tile(NamedTuple):
    """The properties of a format that a kernel needs; a compile-time constant. `offset` is subtracted from
    every code. `rank`: of the LoRA adapter of the matrix; 0: it has none. `unit`: a power of two that
    multiplies the float16 factors of `Scale.SIGNED`.
    """

    code: int
    scale: int
    offset: int = 0
    codebook: int = 0
    rank: int = 0
    unit: float = 1.0


PLANES = {
    Code.NIBBLE: 4,
    Code.NIBBLE_1: 5,
    Code.NIBBLE_2: 6,
    Code.BYTE: 8,
    Code.CODEBOOK: 4,
    Code.HALF: 16,
    Code.BRAIN: 16,
    Code.SINGLE: 32,
}


def device_levels(spec: FormatSpec) -> tuple[int, ...]:
    """The codebook of a format on the device, sixteen levels; empty: it has none. Of a grid: all its levels,
    ascending, then zeros.
    """
    if not spec.grid:
        return spec.levels
    levels = GRIDS[spec.grid].levels
    return (*levels, *[0] * (16 - len(levels)))


CODEBOOKS = tuple(
    dict.fromkeys(
        levels
        for formats in (KERNEL_FORMATS, MULTIPLIED_FORMATS)
        for spec in formats.values()
        if (levels := device_levels(spec))
    )
)
"""The different codebooks, those of KERNEL_FORMATS first; a tile's `codebook` is an index of these."""


def _code_of(spec: FormatSpec) -> Code:
    """The encoding of a format's codes on the device; codes of fewer than four bits take a nibble."""
    if not spec.is_quantized:
        return {"f16": Code.HALF, "bf16": Code.BRAIN, "f32": Code.SINGLE}[spec.fields[0].dtype]
    if spec.levels or spec.grid:
        return Code.CODEBOOK
    if spec.signed:
        return Code.BYTE
    return {5: Code.NIBBLE_1, 6: Code.NIBBLE_2}.get(spec.bits, Code.NIBBLE)


def _scale_of(spec: FormatSpec) -> Scale:
    if not spec.is_quantized:
        return Scale.NONE
    if spec.grid:
        return Scale.SIGNED
    if spec.sub_scales is None:
        return Scale.PAIR if spec.has_minimum else _SCALE_OF_DTYPE[spec.scale_dtype]
    if not spec.has_minimum:
        return Scale.SIGNED
    return Scale.MINIMUM if spec.scale_weights == BLOCK else Scale.SHORT


def tile_of(spec: FormatSpec) -> Tile:
    """The tile of a format."""
    levels = device_levels(spec)
    codebook = CODEBOOKS.index(levels) if levels else 0
    return Tile(_code_of(spec), _scale_of(spec), spec.offset, codebook, unit=spec.unit)


_SCALE_OF_DTYPE = {"f16": Scale.FLOAT16, "e8m0": Scale.BFLOAT16, "e4m3": Scale.E4M3}
TILES = {
    name: tile_of(MULTIPLIED_FORMATS[spec.repacked_as or name])
    for name, spec in FORMATS.items()
    if (spec.repacked_as or name) in MULTIPLIED_FORMATS
}
"""The formats that the device supports."""

STREAMED = tuple(name for name in TILES if (FORMATS[name].repacked_as or name) in KERNEL_FORMATS)
"""Those that kernels decode in the CPU's layout, so that weights can be streamed to the device."""

FLOAT_CODES = (Code.HALF, Code.BRAIN, Code.SINGLE)


class UnsupportedOnDeviceError(ValueError):
    """The device has no kernel for the format of a matrix."""


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class PlaneShapes:
    """Sizes of a matrix of `rows` · `columns` weights on the device."""

    tile: Tile
    rows: int
    columns: int

    @classmethod
    def of(cls, name: str, format_name: str, rows: int, columns: int) -> "PlaneShapes":
        """Raises `UnsupportedOnDeviceError` for a format or a row length without a kernel."""
        tile = TILES.get(format_name)
        if tile is None:
            raise UnsupportedOnDeviceError(
                f"{name}: {format_name} has no kernel on the GPU; it has {', '.join(TILES)}"
            )
        if columns % BLOCK:
            raise UnsupportedOnDeviceError(
                f"{name}: rows of {columns} weights, the GPU kernels need a multiple of {BLOCK}"
            )
        return cls(tile, rows, columns)

    @property
    def padded_rows(self) -> int:
        return _up(self.rows, ROW_MULTIPLE)

    @property
    def blocks(self) -> int:
        """Blocks per row, including padding."""
        return padded_blocks(self.columns)

    @property
    def words(self) -> tuple[int, int, int]:
        return self.padded_rows, PLANES[Code(self.tile.code)], self.blocks

    @property
    def scales(self) -> tuple[int, int]:
        if self.tile.scale == Scale.NONE:
            return 0, 0
        rows = self.padded_rows if self.tile.scale == Scale.PAIR else self.padded_rows // 2
        return rows, self.blocks

    @property
    def super_scales(self) -> tuple[int, int]:
        if self.tile.scale == Scale.SIGNED:
            return self.padded_rows // 2, self.blocks // 8
        if self.tile.scale in (Scale.MINIMUM, Scale.SHORT):
            return self.padded_rows, self.blocks // 8
        return (self.padded_rows, 1) if self.tile.scale == Scale.E4M3 else (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and super-block scales."""
        rows, planes, blocks = self.words
        return 4 * (rows * planes * blocks + sum(a * b for a, b in (self.scales, self.super_scales)))


def padded_blocks(columns: int) -> int:
    """Blocks of 32 per row of `columns`, including padding."""
    return _up(-(-columns // BLOCK), BLOCK_MULTIPLE)
