"""Tensors of a folder in a GGUF format, and the changes of layout that GGUF wants; nothing is read before its
bytes are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import FormatSpec, block_format, decode, encode

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Order = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Stored:
    """A tensor: its shape, its format, and `load`, which returns its bytes as (rows, bytes per row).

    `source`: the name of the tensor in the folder whose bytes these are; "": they are computed.
    """

    shape: tuple[int, ...]
    format: FormatSpec
    load: Callable[[], Bytes]
    source: str = ""

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[-1])

    def rows(self) -> Bytes:
        """The bytes, (rows of all matrices, bytes per row)."""
        return self.load().reshape(-1, self.row_bytes)

    def floats(self) -> Floats:
        """The values, in the tensor's shape."""
        return decode(np.ascontiguousarray(self.rows()).reshape(-1), self.format).reshape(self.shape)

    def reordered(self, order: Order) -> "Stored":
        """The rows in this order, some of them or all."""
        shape = (len(order), *self.shape[1:])
        if len(self.shape) == 1:  # elements of a vector
            return self.computed(shape, lambda values: values[order])
        return replace(self, shape=shape, load=lambda: self.rows()[order], source="")

    def computed(
        self, shape: tuple[int, ...], change: Callable[[Floats], Floats], format: str | None = None
    ) -> "Stored":
        """What `change` makes of the values, in this format, by default the same."""
        kind = self.format if format is None else block_format(format)
        return Stored(shape, kind, lambda: encode(change(self.floats()).astype(np.float32).reshape(-1), kind))

    def as_f32(self) -> "Stored":
        """The values in float32."""
        if self.format.name == "F32":
            return self
        return self.computed(self.shape, lambda values: values, "F32")

    def reshaped(self, shape: tuple[int, ...]) -> "Stored":
        """The same bytes with other dimensions; rows stay whole, or become vectors."""
        return replace(self, shape=shape)


def stacked(parts: Sequence[Stored]) -> Stored:
    """Equal tensors as one with a first dimension of their number."""
    first = parts[0]
    shape = (len(parts), *first.shape)
    return Stored(shape, first.format, lambda: np.concatenate([part.rows() for part in parts]))


def joined(parts: Sequence[Stored]) -> Stored:
    """The rows of several tensors, one after another."""
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    return Stored(
        (rows, *first.shape[1:]), first.format, lambda: np.concatenate([part.rows() for part in parts])
    )


def of_values(values: npt.ArrayLike) -> Stored:
    """A float32 tensor in memory."""
    array = np.ascontiguousarray(values, np.float32)
    return Stored(array.shape, block_format("F32"), lambda: array.reshape(-1).view(np.uint8))
