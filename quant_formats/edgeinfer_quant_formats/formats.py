"""The block formats of ggml: weights per block and bytes per block."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError, printable


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A storage format: `block_elements` weights in `block_bytes` bytes.

    `type_id` is the number in GGUF files (ggml's `enum ggml_type`).
    """

    name: str
    type_id: int
    block_elements: int
    block_bytes: int

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


_BLOCKS = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q4_1", 3, 32, 20),
    BlockFormat("Q5_0", 6, 32, 22),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q2_K", 10, 256, 84),
    BlockFormat("Q3_K", 11, 256, 110),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("IQ4_NL", 20, 32, 18),
    BlockFormat("IQ4_XS", 23, 256, 136),
    BlockFormat("I8", 24, 1, 1),
    BlockFormat("I16", 25, 1, 2),
    BlockFormat("I32", 26, 1, 4),
    BlockFormat("I64", 27, 1, 8),
    BlockFormat("F64", 28, 1, 8),
    BlockFormat("BF16", 30, 1, 2),
    BlockFormat("TQ1_0", 34, 256, 54),
    BlockFormat("TQ2_0", 35, 256, 66),
    BlockFormat("MXFP4", 39, 32, 17),
)

FORMATS: Mapping[str, BlockFormat] = MappingProxyType({block.name: block for block in _BLOCKS})

_BY_TYPE_ID = {block.type_id: block for block in _BLOCKS}

# ggml's current and former types with other numbers, for error messages.
_UNSUPPORTED_NAMES: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}


def block_format(key: str | int | BlockFormat) -> BlockFormat:
    """The format with this name ("Q4_K") or ggml type number (12).

    Raises:
        FormatError: a name or number that is unknown, or known and not supported.
    """
    if isinstance(key, BlockFormat):
        return key
    found = FORMATS.get(key.upper()) if isinstance(key, str) else _BY_TYPE_ID.get(int(key))
    if found is None:
        raise _why_none(key)
    return found


def _why_none(key: str | int) -> FormatError:
    """The error for a missing format: unknown, or known and without a codec."""
    if isinstance(key, str):
        known, seen = key.upper() in _UNSUPPORTED_NAMES.values(), f"format {printable(key)}"
    else:
        known = int(key) in _UNSUPPORTED_NAMES
        seen = f"type {_UNSUPPORTED_NAMES[int(key)]} ({key})" if known else f"type number {key}"
    supported = f"supported: {', '.join(FORMATS)}"
    if known:
        return UnsupportedTypeError(f"{seen} is not supported; {supported}")
    return FormatError(f"{seen} is unknown; {supported}")
