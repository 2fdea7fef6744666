"""Per-call arguments: the addresses of the tokens' hidden states, their positions, and the RoPE tables."""

from struct import pack_into

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.rope import RopeSpec
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.abi import CALL, PLACE

ROPE_POSITIONS = 256
"""Positions whose cosines and sines are computed together; one by one, they would cost 50 us per token."""


class RopeTable:
    """Cosines and sines of the last requested positions and some after them; empty without a `rope`."""

    def __init__(self, rope: RopeSpec | None) -> None:
        self._rope = rope
        self._start = self._end = 0
        self.stride = 0
        """Stride in bytes between positions, for the last result of `address_of`."""

    def address_of(self, start: int, count: int) -> int:
        """Address of the cosines and sines of `count` positions from `start` on, 0 without RoPE; computed for
        many positions at a time.
        """
        if self._rope is None:
            return 0
        if not self._start <= start <= start + count <= self._end:
            self._table = self._rope.table(start, max(count, ROPE_POSITIONS))
            self._start, self._end = start, start + len(self._table)
            self._address, self.stride = address(self._table), self._table.strides[0]
        return self._address + (start - self._start) * self.stride


CALL_FIELDS = f"{len(CALL)}q"


def fill_call(
    call: npt.NDArray[np.int64],
    rows: int,
    stride: int,
    tokens: int,
    start: int,
    rope: int,
    places: int = 0,
) -> None:
    """Fill a CALL for tokens whose rows are at `rows`, `stride` bytes apart; `rope` is 0 without RoPE.

    `places`: 0, or the address of a `PositionTable`.
    """
    pack_into(CALL_FIELDS, call.data, 0, rows, stride, tokens, start, rope, places)


class PositionTable:
    """The PLACE structures of some tokens, at `address`."""

    def __init__(self, places: BatchPositions) -> None:
        self._pages = np.ascontiguousarray(places.pages, np.int64)
        self._copies = [np.array([*copies, -1], np.int64) for copies in places.copies]
        count = len(places.positions)
        self._fields = np.zeros((count, len(PLACE)), np.int64)
        self._fields[:, PLACE.position // 8] = places.positions
        self._fields[:, PLACE.pages // 8] = address(self._pages) + self._pages.strides[0] * np.arange(count)
        if self._copies:
            self._fields[:, PLACE.copies // 8] = [address(copies) for copies in self._copies]
        self.address = address(self._fields)
