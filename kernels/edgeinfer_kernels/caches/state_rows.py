"""Rows of hidden states in main memory that are passed on without numpy, and the addresses of arrays.

Between two steps of a small model the caches hold none of Python's data: a view takes a few microseconds, an
assignment ten, an address twenty.
"""

from ctypes import addressof, c_char
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
MAX_KNOWN = 16
"""Arrays whose addresses are kept: a step hands out the same one for each number of tokens."""


class StateRows:
    """`count` rows of an array (rows, width) float32 from `first` on. A slice has the same type."""

    __slots__ = ("array", "count", "first")

    def __init__(self, array: Floats, first: int, count: int) -> None:
        self.array, self.first, self.count = array, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> "StateRows":
        start, stop, _ = part.indices(self.count)
        return StateRows(self.array, self.first + start, stop - start)

    @property
    def view(self) -> Floats:
        """The rows as an array."""
        return self.array[self.first : self.first + self.count]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.view, dtype, copy=copy)


class RowAddresses:
    """The addresses of the last arrays of rows with `width` elements that were requested."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._known = dict[int, tuple[Floats, int | None]]()
        """By the identity of the arrays, which thus exist."""

    def of(self, rows: Floats) -> int | None:
        """The address of `rows`; None: they aren't writable float32 rows one after the other."""
        known = self._known.get(id(rows))
        if known is None:
            known = self._known[id(rows)] = rows, self._found(rows)
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return known[1]

    def _found(self, rows: Floats) -> int | None:
        flags, shape = rows.flags, (len(rows), self._width)
        if rows.dtype != np.float32 or rows.shape != shape or not (flags.c_contiguous and flags.writeable):
            return None
        return addressof(c_char.from_buffer(rows.data)) if len(rows) else None
