"""The location of the floating-point scales in the blocks of each format."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.formats import block_format

F16_EXPONENT, BF16_EXPONENT, F32_EXPONENT, E8M0_EXPONENT = 0x7C00, 0x7F80, 0x7F800000, 0xFF
"""The exponent bits of a number; all of them are set in NaN and infinity."""


@dataclass(frozen=True)
class ScaleField:
    """`count` numbers of `unit` bytes from byte `offset` of a block, and their exponent bits."""

    offset: int
    unit: int
    count: int
    exponent: int = F16_EXPONENT


SCALE_FIELDS: Mapping[str, ScaleField] = MappingProxyType(
    {
        "F32": ScaleField(0, 4, 1, F32_EXPONENT),
        "F16": ScaleField(0, 2, 1),
        "BF16": ScaleField(0, 2, 1, BF16_EXPONENT),
        "Q4_0": ScaleField(0, 2, 1),
        "Q4_1": ScaleField(0, 2, 2),
        "Q5_0": ScaleField(0, 2, 1),
        "Q5_1": ScaleField(0, 2, 2),
        "Q8_0": ScaleField(0, 2, 1),
        "Q2_K": ScaleField(80, 2, 2),
        "Q3_K": ScaleField(108, 2, 1),
        "Q4_K": ScaleField(0, 2, 2),
        "Q5_K": ScaleField(0, 2, 2),
        "Q6_K": ScaleField(208, 2, 1),
        "IQ4_NL": ScaleField(0, 2, 1),
        "IQ4_XS": ScaleField(0, 2, 1),
        "TQ1_0": ScaleField(52, 2, 1),
        "TQ2_0": ScaleField(64, 2, 1),
        "MXFP4": ScaleField(0, 1, 1, E8M0_EXPONENT),
    }
)
"""Format -> its scales (and minima); for float formats the numbers themselves."""


def non_finite_blocks(raw: NDArray[np.uint8], name: str) -> NDArray[np.int64]:
    """The indices of blocks of format `name` in `raw`, whole blocks in order, whose scales are NaN or Inf."""
    field = SCALE_FIELDS[name]
    blocks = raw.reshape(-1, block_format(name).block_bytes)
    numbers = np.ascontiguousarray(blocks[:, field.offset : field.offset + field.unit * field.count])
    bits = numbers.view(f"<u{field.unit}")
    return np.flatnonzero(((bits & field.exponent) == field.exponent).any(axis=1))


def non_finite_error(tensor: str, where: str) -> FormatError:
    """The error for a tensor that contains NaN or infinity."""
    return FormatError(
        f"{printable(tensor)}: NaN or infinity in {where}, wanted finite numbers; the model file is damaged, "
        "download it again"
    )
