"""The rows that a recurrent block keeps of recent positions, and to which positions they can be rewound."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.runtime.abi import CHECKPOINT_POSITIONS, RING_ROWS

AHEAD_POSITIONS = 8
"""Positions that a device may have computed after the end that the caller knows."""


def checkpoints_for(context: int) -> int:
    """Number of checkpoints in a context."""
    return context // CHECKPOINT_POSITIONS


def rows_for(context: int, rows: int) -> int:
    """Rows of the ring and of all checkpoints, if a block reads `rows` rows before a position."""
    return RING_ROWS + checkpoints_for(context) * rows


@dataclass(frozen=True)
class RecentRows:
    """Rows of one block: position p is in `ring[0, p % RING_ROWS]`. The last `rows` before each multiple of
    CHECKPOINT_POSITIONS are also in `checkpoints`, (1, checkpoints · rows, width), in order. Both are numpy
    arrays in main memory, or tensors on a GPU.
    """

    ring: Any
    checkpoints: Any
    rows: int

    @classmethod
    def allocate(cls, context: int, rows: int, width: int, dtype: npt.DTypeLike = np.float32) -> "RecentRows":
        """Zeros for a context; `rows`: that a block reads before a position."""
        checkpoints = np.zeros((1, checkpoints_for(context) * rows, width), dtype)
        return cls(np.zeros((1, RING_ROWS, width), dtype), checkpoints, rows)

    @property
    def nbytes(self) -> int:
        return int(self.ring.nbytes + self.checkpoints.nbytes)

    def before(self, start: int) -> npt.NDArray[Any]:
        """(rows, width): the rows of the positions before `start`; zeros before position 0."""
        positions = np.arange(start - self.rows, start)
        return np.asarray(np.where(positions[:, None] < 0, 0, self.ring[0, positions % RING_ROWS]))

    def write(self, start: int, rows: npt.NDArray[Any]) -> None:
        """Write the rows (tokens, width) of positions start…"""
        first = max(0, len(rows) - RING_ROWS)
        positions = np.arange(start, start + len(rows))
        self.ring[0, positions[first:] % RING_ROWS] = rows[first:]
        number, before = checkpoint_rows(positions, self.rows)
        selected = (before < self.rows) & (number * self.rows < self.checkpoints.shape[1])
        self.checkpoints[0, (number * self.rows + self.rows - 1 - before)[selected]] = rows[selected]

    def views(self, end: int) -> tuple[Any, ...]:
        """The ring, and the checkpoints within the first `end` positions."""
        return self.ring, self.checkpoints[:, : checkpoints_for(end) * self.rows]

    def restore_checkpoint(self, position: int) -> None:
        """Copy the rows before `position`, a multiple of CHECKPOINT_POSITIONS, to the ring."""
        if position:
            last = position // CHECKPOINT_POSITIONS * self.rows
            self.ring[0, RING_ROWS - self.rows :] = self.checkpoints[0, last - self.rows : last]


def checkpoint_rows(positions: npt.NDArray[Any], rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The number of the checkpoint after each position, and how many positions are in between."""
    number = positions // CHECKPOINT_POSITIONS
    return number, (number + 1) * CHECKPOINT_POSITIONS - 1 - positions


class RewindLimit:
    """To which positions recurrent blocks that read `rows` rows before a position can be rewound; 0: to all.

    `oldest`: the first position whose row is in every ring.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.oldest = 0

    def restored(self, end: int) -> None:
        """The state was replaced by one after `end` positions."""
        self.oldest = max(0, end - self.rows)

    def rewind(self, length: int, end: int | None) -> "Rewind":
        """Rewind a state after `end` positions to at most `length`; None: only its checkpoints are valid."""
        if not self.rows:
            return Rewind(length, False)
        if length == 0:
            self.oldest = 0
            return Rewind(0, False)
        if end is not None and max(0, length - self.rows) >= self._oldest_kept(end):
            return Rewind(length, False)
        checkpoint = length // CHECKPOINT_POSITIONS * CHECKPOINT_POSITIONS
        self.restored(checkpoint)
        return Rewind(checkpoint, True)

    def _oldest_kept(self, end: int) -> int:
        """The first position whose row is in a ring after `end` positions."""
        return max(self.oldest, end + AHEAD_POSITIONS - RING_ROWS)


class Rewind(NamedTuple):
    """How many positions are kept, and whether the blocks restore the checkpoint there."""

    kept: int
    restores: bool
