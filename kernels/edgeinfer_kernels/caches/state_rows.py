"""Rows of hidden states in main memory, as steps hand them out: how they are copied, and where they are."""

from ctypes import addressof, c_char, memmove

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


MAX_KNOWN = 16
"""Arrays whose addresses are kept: a step hands out the same one for each number of tokens."""


class RowAddresses:
    """The addresses of the last arrays of rows with `width` elements. One takes as long to find as much of
    the Python between two steps of a small model.
    """

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


class StateRows:
    """An array of `capacity` rows, into which rows are copied without numpy: its assignment takes ten times
    as long if it isn't in a cache.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.array = np.empty((capacity, width), np.float32)
        self._address, self._row_bytes = self.array.ctypes.data, self.array.strides[0]
        self._sources = RowAddresses(width)

    def write(self, at: int, rows: Floats, column: int = 0) -> None:
        """Copy rows to those from `at` on, from a column on."""
        source = self._sources.of(rows)
        if source is None:
            self.array[at : at + len(rows), column : column + rows.shape[1]] = rows
        else:
            memmove(self._address + at * self._row_bytes, source, len(rows) * self._row_bytes)
