"""The interleaved layout: how the bytes of a block are grouped, and conversion of a matrix to it.

Sixteen rows form a group. The bytes of a block are split into units (a float16, a word of four quantized
columns…). Unit u of the group consists of unit u of each of the sixteen rows, adjacent. The group takes
exactly the bytes of its rows. An incomplete last group is padded with zero rows; float rows are padded with
zero columns to a multiple of four.

The codes of Q6_K are packed again afterwards. Of 128 columns, a byte has the code of one of the first 96 in
its low six bits, and a part of one of the last 32 in its top two bits. Unpacking four codes then takes 11
operations instead of 22. The other formats keep the bits of the file.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from edgeinfer_quant_formats.formats import MULTIPLIED_FORMATS, FormatSpec
from edgeinfer_quant_formats.formats import Field as SpecField

ROWS_PER_GROUP = 16


SIX_BIT_BYTES = 192
"""Bytes of the codes of a Q6_K block."""
PACKED_CODES = 0
"""The unit of a field that is no field: Q6_K's codes of 256 columns are packed again, in `count` steps."""


@dataclass(frozen=True)
class Field:
    """`count` units of `unit` bytes, from byte `offset` of a block."""

    offset: int
    unit: int
    count: int


def _unit(field: SpecField) -> int:
    """Bytes that stay together: a number, or four bytes of codes."""
    nbytes = field.unit * field.count
    return 4 if field.unit == 1 and nbytes % 4 == 0 else field.unit


def interleaved_fields(spec: FormatSpec) -> tuple[Field, ...]:
    """The fields of a block, in order and without gaps; neighbors of the same unit are one."""
    fields: list[Field] = []
    for field in spec.fields:
        unit, nbytes = _unit(field), field.unit * field.count
        if fields and fields[-1].unit == unit:
            nbytes += unit * fields.pop().count
        fields.append(Field(field.end - nbytes, unit, nbytes // unit))
    return tuple(fields)


FIELDS: dict[str, tuple[Field, ...]] = {
    name: interleaved_fields(spec) for name, spec in MULTIPLIED_FORMATS.items()
}
"""Format -> the fields of its block."""


def gather_steps(name: str) -> tuple[Field, ...]:
    """What `interleave_rows` does with a block: its fields, then what is packed again."""
    return (*FIELDS[name], *((Field(0, PACKED_CODES, 8),) if name == "Q6_K" else ()))


def split_fields(spec: FormatSpec) -> tuple[Field, ...]:
    """The fields of 32 columns of a format in the per-neuron layout: float16 factors, byte factors, codes."""
    scales = spec.scales
    assert scales is not None
    parts = [(2, scales.count), *([(1, 2)] if spec.sub_scales else []), (4, spec.bits)]
    fields: list[Field] = []
    for unit, count in parts:
        start = fields[-1].offset + fields[-1].unit * fields[-1].count if fields else 0
        fields.append(Field(start, unit, count))
    return tuple(fields)


def interleaved_offsets(name: str) -> Any:
    """A namedtuple of byte offsets in a block of sixteen rows, one for each field of the format; numba treats
    its members as constants.
    """
    fields = MULTIPLIED_FORMATS[name].fields
    made: Any = namedtuple(name, [field.name for field in fields])  # type: ignore[misc]
    return made(*(ROWS_PER_GROUP * field.offset for field in fields))
