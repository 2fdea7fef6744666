"""What changes from call to call: where the tokens' rows lie, their positions, and the cosines for these."""

from struct import pack_into

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.memory import address
from edgeinfer_kernels.cpu.structures import CALL
from edgeinfer_kernels.specification import RopeSpecification

ROPE_POSITIONS = 256
"""Positions whose cosines and sines are computed together: one by one they'd cost 50 us a token."""


class RopeTable:
    """Cosines and sines of the positions last asked for and some behind them; without a `rope`, none."""

    def __init__(self, rope: RopeSpecification | None) -> None:
        self._rope = rope
        self._start = self._end = 0

    def address_of(self, start: int, count: int) -> int:
        """Where `count` positions from `start` on lie, 0 without RoPE; made for many positions at a time."""
        if self._rope is None:
            return 0
        if not self._start <= start <= start + count <= self._end:
            self._table = self._rope.table(start, max(count, ROPE_POSITIONS))
            self._start, self._end = start, start + len(self._table)
            self._address, self._stride = address(self._table), self._table.strides[0]
        return self._address + (start - self._start) * self._stride


CALL_FIELDS = f"{len(CALL)}q"


def fill_call(
    call: npt.NDArray[np.int64], rows: int, stride: int, tokens: int, start: int, rope: int
) -> None:
    """Write a CALL for tokens whose rows lie at `rows`, `stride` bytes apart; without RoPE `rope` is 0."""
    pack_into(CALL_FIELDS, call.data, 0, rows, stride, tokens, start, rope)
