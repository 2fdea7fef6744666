"""The interleaved layout: how the bytes of a block are grouped, and conversion of a matrix to it.

Sixteen rows form a group. The bytes of a block are split into units (a float16, a word of four quantized
columns…). Unit u of the group consists of unit u of each of the sixteen rows, side by side. The group takes
exactly the bytes of its rows. An incomplete last group is padded with zero rows; float rows are padded with
zero columns to a multiple of four.
"""

from dataclasses import dataclass

ROWS_PER_GROUP = 16


@dataclass(frozen=True)
class Field:
    """`count` units of `unit` bytes, from byte `offset` of a block."""

    offset: int
    unit: int
    count: int


def _fields(*parts: tuple[int, int]) -> tuple[Field, ...]:
    fields, offset = [], 0
    for unit, count in parts:
        fields.append(Field(offset, unit, count))
        offset += unit * count
    return tuple(fields)


FIELDS: dict[str, tuple[Field, ...]] = {
    "F32": _fields((4, 1)),
    "F16": _fields((2, 1)),
    "BF16": _fields((2, 1)),
    "Q4_0": _fields((2, 1), (4, 4)),
    "Q4_1": _fields((2, 2), (4, 4)),
    "Q5_0": _fields((2, 1), (4, 5)),
    "Q5_1": _fields((2, 2), (4, 5)),
    "Q8_0": _fields((2, 1), (4, 8)),
    "Q2_K": _fields((4, 20), (2, 2)),
    "Q3_K": _fields((4, 27), (2, 1)),
    "Q4_K": _fields((2, 2), (4, 35)),
    "Q5_K": _fields((2, 2), (4, 43)),
    "Q6_K": _fields((4, 52), (2, 1)),
    "IQ4_NL": _fields((2, 1), (4, 4)),
    "IQ4_XS": _fields((2, 2), (4, 33)),
    "MXFP4": _fields((1, 1), (4, 4)),
    "TQ2_0": _fields((4, 16), (2, 1)),
}
"""Format -> the fields of its block, in order and without gaps."""
