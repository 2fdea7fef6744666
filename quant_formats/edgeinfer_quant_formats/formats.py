"""One specification per quantization type: its block, fields, codes, levels and scales.

Codecs, damage checks, CPU kernels and CUDA kernels take these facts from here; see CONTRIBUTING.md for how to
add a type.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError, printable

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e8m0": 1, "e4m3": 1, "u16": 2, "u8": 1, "i8": 1}
EXPONENT_BITS = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "e8m0": 0xFF}
"""The exponent bits of a number: all are set in NaN and infinity. e8m0 is a power of two, 2^(e - 127)."""


@dataclass(frozen=True, slots=True)
class Field:
    """`count` elements of type `dtype`, from byte `offset` of a block."""

    name: str
    dtype: str
    offset: int
    count: int

    @property
    def unit(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.unit * self.count


@dataclass(frozen=True, slots=True)
class CodeBits:
    """`bits` bits of every code, from bit `shift` on, in the bytes of a field.

    Every `group` bytes hold the lowest bits of `group` consecutive codes, then the next bits the next codes.
    """

    field: str
    bits: int
    group: int
    shift: int = 0


class SubScales(Enum):
    """How a block of 256 weights stores the scales of its sub-blocks; they are multiples of its float16."""

    SIX_BITS_AND_MINIMA = "scales, 12 bytes: 8 scales and 8 minima of 6 bits"
    NIBBLES_AND_MINIMA = "scales, 16 bytes: a scale in the low nibble, a minimum in the high one"
    SIX_BITS = "scales, 12 bytes: 16 scales of 6 bits, less 32"
    BYTES = "scales, 16 int8"
    SPLIT_SIX_BITS = "scales_l, 4 bytes, and scales_h, 16 bits: 8 scales of 6 bits, less 32"

    @property
    def weights(self) -> int:
        """Weights per scale."""
        return 32 if self in (SubScales.SIX_BITS_AND_MINIMA, SubScales.SPLIT_SIX_BITS) else 16

    @property
    def minima(self) -> bool:
        return self in (SubScales.SIX_BITS_AND_MINIMA, SubScales.NIBBLES_AND_MINIMA)


@dataclass(frozen=True, slots=True)
class ScaleField:
    """`count` adjacent numbers of `unit` bytes from byte `offset` of a block, and their exponent bits."""

    offset: int
    unit: int
    count: int
    exponent: int


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A storage format: `block_elements` weights in `block_bytes` bytes.

    weight = scale · level (+ m, or - minimum), where level = levels[code], or step·code - offset.
    `type_id` is the number in GGUF files (ggml's `enum ggml_type`).
    """

    name: str
    type_id: int
    block_elements: int
    block_bytes: int
    fields: tuple[Field, ...]
    codes: tuple[CodeBits, ...] = ()
    """Empty for plain numbers, for TQ1_0, whose codes are not whole bits, and for grids."""
    step: int = 1
    offset: int = 0
    signed: bool = False
    """Codes are int8."""
    levels: tuple[int, ...] = ()
    """Codebook of int8 levels; empty: levels are `step·code - offset`."""
    grid: str = ""
    """The grid whose rows are levels, see `grids.py`; the codec knows how indices and signs are stored."""
    largest_level: int = 0
    """Of a grid: the largest magnitude of a level."""
    sub_block: int = 0
    """Of a grid: weights per scale."""
    unit: float = 1.0
    """Of a grid: a scale is this, times `d`, times an odd number."""
    sub_scales: SubScales | None = None
    fallback: str = "F16"
    """The quantizer's type for rows that don't fill whole blocks."""
    repacked_as: str | None = None
    """A type with the same values, for which there are kernels."""

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    @property
    def is_known(self) -> bool:
        """False for a type that is only listed, see `listed_format`."""
        return bool(self.fields)

    @property
    def is_quantized(self) -> bool:
        return self.block_elements > 1

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(part.bits for part in self.codes)

    @property
    def level_range(self) -> tuple[int, int]:
        """The lowest and the highest level."""
        if self.grid:
            return -self.largest_level, self.largest_level
        if self.levels:
            return min(self.levels), max(self.levels)
        count = 1 << self.bits
        if self.signed:
            return -count // 2, count // 2 - 1
        return -self.offset, self.step * (count - 1) - self.offset

    @property
    def has_minimum(self) -> bool:
        """Whether a weight is a multiple of its scale plus or minus a stored number."""
        return any(field.name in ("m", "dmin") for field in self.fields)

    @property
    def scale_weights(self) -> int:
        """Weights per scale."""
        if self.sub_scales:
            return self.sub_scales.weights
        return self.sub_block or self.block_elements

    @property
    def scale_dtype(self) -> str:
        """The dtype of the floating-point scale: "f16", "e8m0" for a power of two, or "e4m3" without sign."""
        kinds = (*EXPONENT_BITS, "e4m3")
        return next((field.dtype for field in self.fields if field.dtype in kinds), "f16")

    @property
    def scales(self) -> ScaleField | None:
        """The floating-point scales (and minima) of a block; for floats the numbers. None for integers, and
        for scales that are always finite (e4m3).
        """
        fields = [field for field in self.fields if field.dtype in EXPONENT_BITS]
        if self.name == "IQ1_M":  # The exponent is in the top nibbles of the last two shorts.
            return ScaleField(self.field("scales").offset + 4, 4, 1, 0x7000C000)
        if not fields:
            return None
        first, count = fields[0], sum(field.count for field in fields)
        return ScaleField(first.offset, first.unit, count, EXPONENT_BITS[first.dtype])

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of `columns` weights.

        Raises:
            FormatError: the row does not fill whole blocks.
        """
        if columns < 1 or columns % self.block_elements:
            raise FormatError(
                f"row of {columns} weights is not a multiple of the {self.name} block ({self.block_elements})"
            )
        return columns // self.block_elements * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of `shape` (numpy order: the last dimension is the row).

        Raises:
            FormatError: no dimension, one below 1, or a row that does not fill whole blocks.
        """
        if not shape or min(shape) < 1:
            raise FormatError(f"shape {tuple(shape)}: wanted at least one dimension, each at least 1")
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


def _spec(name: str, type_id: int, elements: int, fields: str, **options: Any) -> FormatSpec:
    """A specification; `fields` is the struct, such as "f16 d; u8 qs[16]"."""
    placed_fields: list[Field] = []
    for field in fields.split("; "):
        dtype, _, remainder = field.partition(" ")
        field_name, _, count = remainder.rstrip("]").partition("[")
        placed_fields.append(
            Field(field_name, dtype, placed_fields[-1].end if placed_fields else 0, int(count or 1))
        )
    return FormatSpec(name, type_id, elements, placed_fields[-1].end, tuple(placed_fields), **options)


def _number(name: str, type_id: int, nbytes: int) -> FormatSpec:
    """A plain number; its field is a float if kernels multiply with it."""
    dtype = {"F32": "f32", "F16": "f16", "BF16": "bf16"}.get(name)
    return _spec(name, type_id, 1, f"{dtype} value" if dtype else f"u8 value[{nbytes}]")


def _grid(
    name: str, type_id: int, fields: str, grid: str, largest: int, sub_block: int, unit: float
) -> FormatSpec:
    """A type with the rows of a grid."""
    return _spec(
        name, type_id, 256, fields,
        grid=grid, largest_level=largest, sub_block=sub_block, unit=unit, fallback="IQ4_NL",
    )  # fmt: skip


_NIBBLES = (CodeBits("qs", 4, 16),)
_FIVE_BITS = (CodeBits("qs", 4, 16), CodeBits("qh", 1, 1, shift=4))
_TWO_BITS = (CodeBits("qs", 2, 32),)
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of FP4 (E2M1; OCP Microscaling Formats v1.0, table 5): the block's scale is halved.
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_K_SCALES = SubScales.SIX_BITS_AND_MINIMA

_SPECS = (
    _number("F32", 0, 4),
    _number("F16", 1, 2),
    _spec("Q4_0", 2, 32, "f16 d; u8 qs[16]", codes=_NIBBLES, offset=8),
    _spec("Q4_1", 3, 32, "f16 d; f16 m; u8 qs[16]", codes=_NIBBLES),
    _spec("Q5_0", 6, 32, "f16 d; u8 qh[4]; u8 qs[16]", codes=_FIVE_BITS, offset=16),
    _spec("Q5_1", 7, 32, "f16 d; f16 m; u8 qh[4]; u8 qs[16]", codes=_FIVE_BITS),
    _spec("Q8_0", 8, 32, "f16 d; i8 qs[32]", codes=(CodeBits("qs", 8, 32),), signed=True),
    _spec(
        "Q2_K", 10, 256, "u8 scales[16]; u8 qs[64]; f16 d; f16 dmin",
        codes=_TWO_BITS, sub_scales=SubScales.NIBBLES_AND_MINIMA, fallback="Q4_0",
    ),
    _spec(
        "Q3_K", 11, 256, "u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d",
        codes=(*_TWO_BITS, CodeBits("hmask", 1, 32, shift=2)), offset=4,
        sub_scales=SubScales.SIX_BITS, fallback="Q4_0",
    ),
    _spec(
        "Q4_K", 12, 256, "f16 d; f16 dmin; u8 scales[12]; u8 qs[128]",
        codes=(CodeBits("qs", 4, 32),), sub_scales=_K_SCALES, fallback="Q5_0",
    ),
    _spec(
        "Q5_K", 13, 256, "f16 d; f16 dmin; u8 scales[12]; u8 qh[32]; u8 qs[128]",
        codes=(CodeBits("qs", 4, 32), CodeBits("qh", 1, 32, shift=4)), sub_scales=_K_SCALES, fallback="Q5_1",
    ),
    _spec(
        "Q6_K", 14, 256, "u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d",
        codes=(CodeBits("ql", 4, 64), CodeBits("qh", 2, 32, shift=4)), offset=32,
        sub_scales=SubScales.BYTES, fallback="Q8_0",
    ),
    _grid("IQ2_XXS", 16, "f16 d; u8 qs[64]", "IQ2_XXS", 43, 32, 1 / 8),
    _grid("IQ2_XS", 17, "f16 d; u8 qs[64]; u8 scales[8]", "IQ2_XS", 43, 16, 1 / 8),
    _grid("IQ3_XXS", 18, "f16 d; u8 qs[64]; u8 scales[32]", "IQ3_XXS", 62, 32, 1 / 4),
    _grid("IQ1_S", 19, "f16 d; u8 qs[32]; u8 qh[16]", "IQ1", 9, 32, 1 / 8),
    _spec("IQ4_NL", 20, 32, "f16 d; u8 qs[16]", codes=_NIBBLES, levels=_IQ4_LEVELS),
    _grid("IQ3_S", 21, "f16 d; u8 qs[64]; u8 qh[8]; u8 signs[32]; u8 scales[4]", "IQ3_S", 15, 32, 1.0),
    _grid(
        "IQ2_S", 22, "f16 d; u8 qs[32]; u8 signs[32]; u8 qh[8]; u8 scales[8]", "IQ2_S", 43, 16, 1 / 8
    ),
    _spec(
        "IQ4_XS", 23, 256, "f16 d; u16 scales_h; u8 scales_l[4]; u8 qs[128]",
        codes=_NIBBLES, levels=_IQ4_LEVELS, sub_scales=SubScales.SPLIT_SIX_BITS, fallback="IQ4_NL",
    ),
    _number("I8", 24, 1),
    _number("I16", 25, 2),
    _number("I32", 26, 4),
    _number("I64", 27, 8),
    _number("F64", 28, 8),
    # The float16 scale is the top nibbles of the 16-bit words of `scales`, the lowest first.
    _grid("IQ1_M", 29, "u8 qs[32]; u8 qh[16]; u8 scales[8]", "IQ1", 9, 16, 1 / 8),
    _number("BF16", 30, 2),
    _spec("TQ1_0", 34, 256, "u8 qs[48]; u8 qh[4]; f16 d", offset=1, fallback="Q4_0", repacked_as="TQ2_0"),
    _spec("TQ2_0", 35, 256, "u8 qs[64]; f16 d", codes=_TWO_BITS, offset=1, fallback="Q4_0"),
    _spec("MXFP4", 39, 32, "e8m0 e; u8 qs[16]", codes=_NIBBLES, levels=_FP4_LEVELS),
    _spec(
        "NVFP4", 40, 64, "e4m3 d[4]; u8 qs[32]",
        codes=(CodeBits("qs", 4, 8),), levels=_FP4_LEVELS, sub_block=16,
    ),
    _spec("Q1_0", 41, 128, "f16 d; u8 qs[16]", codes=(CodeBits("qs", 1, 1),), step=2, offset=1),
    _spec("Q2_0", 42, 64, "f16 d; u8 qs[16]", codes=(CodeBits("qs", 2, 1),), offset=1),
)  # fmt: skip

FORMATS: Mapping[str, FormatSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
KERNEL_FORMATS: Mapping[str, FormatSpec] = MappingProxyType(
    {spec.name: spec for spec in _SPECS if spec.codes or spec.name in ("F32", "F16", "BF16")}
)
"""The formats without a grid that kernels multiply; others are converted first, or hold no weights."""
MULTIPLIED_FORMATS: Mapping[str, FormatSpec] = MappingProxyType(
    dict(KERNEL_FORMATS) | {spec.name: spec for spec in _SPECS if spec.grid}
)
"""The formats that kernels multiply. A GPU stores those with a grid as indices of its levels."""

_BY_TYPE_ID = {spec.type_id: spec for spec in _SPECS}

# ggml's current and former types with other numbers, for error messages.
_UNSUPPORTED_NAMES: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def block_format(key: str | int | FormatSpec) -> FormatSpec:
    """The format with this name ("Q4_K") or ggml type number (12).

    Raises:
        FormatError: a name or number that is unknown, or known and not supported.
    """
    if isinstance(key, FormatSpec):
        return key
    spec = FORMATS.get(key.upper()) if isinstance(key, str) else _BY_TYPE_ID.get(int(key))
    if spec is None:
        raise missing_format_error(key)
    return spec


def missing_format_error(key: str | int) -> FormatError:
    """The error for a missing format: unknown, or known and without a codec."""
    names = {number: name for number, name in _UNSUPPORTED_NAMES.items() if name not in FORMATS}
    if isinstance(key, str):
        known, seen = key.upper() in names.values(), f"format {printable(key)}"
    else:
        known = int(key) in names
        seen = f"type {names[int(key)]} ({key})" if known else f"type number {key}"
    supported = f"supported: {', '.join(FORMATS)}"
    if known:
        return UnsupportedTypeError(f"{seen} is not supported; {supported}")
    if isinstance(key, str):
        return FormatError(f"{seen} is unknown; {supported}")
    return UnsupportedTypeError(f"{seen} is unknown; {supported}")


def listed_format(number: int) -> FormatSpec:
    """The format with this ggml type number. For one without a codec, a format that has its name, no fields
    and no size: enough to list a tensor.
    """
    if number in _BY_TYPE_ID:
        return _BY_TYPE_ID[number]
    return FormatSpec(_UNSUPPORTED_NAMES.get(number, f"type {number}"), number, 1, 0, ())


def non_finite_blocks(raw: NDArray[np.uint8], name: str) -> NDArray[np.int64]:
    """The indices of blocks of format `name` in `raw`, whole blocks in order, whose scales are NaN or Inf."""
    spec = block_format(name)
    field = spec.scales
    if field is None:
        return np.empty(0, np.int64)
    blocks = raw.reshape(-1, spec.block_bytes)
    numbers = np.ascontiguousarray(blocks[:, field.offset : field.offset + field.unit * field.count])
    bits = numbers.view(f"<u{field.unit}")
    return np.flatnonzero(((bits & field.exponent) == field.exponent).any(axis=1))


def non_finite_error(tensor: str, where: str) -> FormatError:
    """The error for a tensor that contains NaN or infinity."""
    return FormatError(
        f"{printable(tensor)}: NaN or infinity in {where}, wanted finite numbers; the model file is damaged, "
        "download it again"
    )
