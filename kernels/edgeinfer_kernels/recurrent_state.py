"""Recurrent state: what a block keeps instead of a KV cache, and to which positions it can be rewound.

A block keeps its state after several positions, each in a slot. A step reads one slot and writes another
one, so no state is copied. The rows that the recurrence reads of the last RING_ROWS positions are kept too: a
rewind to a position after that of a slot processes them again, without the model's weights.

A step with a draft tree writes the state before the tree to a slot, and the rows of all its tokens, in their
order. Those of the accepted path are moved to its positions; the next step processes them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.pages import aligned_zeros

WORKING_SLOTS = 4
"""Slots besides checkpoints: what a step reads, what it writes, and two older ones."""
MIN_CHECKPOINTS, MAX_CHECKPOINTS = 4, 16
CHECKPOINTS_BYTES = 128 << 20
"""Maximum bytes of the checkpoints of all layers, if there are more than MIN_CHECKPOINTS."""
SAVE_POSITIONS = 16
"""Distance of the older slots during single-token steps."""


def slots_for(slot_bytes: int) -> int:
    """Number of slots of each block, if one slot of all blocks has `slot_bytes`."""
    fitting = CHECKPOINTS_BYTES // max(1, slot_bytes)
    return WORKING_SLOTS + min(MAX_CHECKPOINTS, max(MIN_CHECKPOINTS, fitting))


class RecurrentStep(NamedTuple):
    """What a step reads and writes: it starts with the state in slot `source`, `pending` positions before
    the step, and writes the state after it to slot `target`.
    """

    pending: int = 0
    source: int = 0
    target: int = 1


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of a recurrent state, in float32 elements.

    A slot has the first `tail_width` elements of the rows of the `tail_rows` positions before it, and a
    `matrix`, of pieces of `piece_rows` x 16 elements. A row has `row_width` elements. Widths are multiples of
    16. `slots`: number of slots.
    """

    tail_rows: int
    tail_width: int
    row_width: int
    matrix: int
    slots: int
    piece_rows: int = 0

    @property
    def slot_width(self) -> int:
        return self.tail_rows * self.tail_width + self.matrix

    @property
    def nbytes(self) -> int:
        """Bytes of a block's state."""
        return 4 * (RING_ROWS * self.row_width + self.slots * self.slot_width)

    def allocate(self) -> "RecurrentState":
        """The zeroed state in main memory, at whole cache lines."""
        ring = aligned_zeros((RING_ROWS, self.row_width), np.float32)
        return RecurrentState(self, ring, aligned_zeros((self.slots, self.slot_width), np.float32))


@dataclass(frozen=True)
class RecurrentState:
    """The state of one block: the row of position p is `ring[p % RING_ROWS]`. Both arrays are float32: numpy
    arrays in main memory, or tensors on a GPU. The state before position 0 is zero, whatever a slot has.
    """

    shape: RecurrentShape
    ring: Any
    slots: Any

    @property
    def nbytes(self) -> int:
        return int(self.ring.nbytes + self.slots.nbytes)

    def pooled(self, count: int) -> "tuple[RecurrentState, list[RecurrentState]]":
        """As `BlockState.pooled`: the arrays of all states, one after the other."""
        shape = self.shape
        ring = aligned_zeros((count * RING_ROWS, shape.row_width), np.float32)
        slots = aligned_zeros((count * shape.slots, shape.slot_width), np.float32)
        parts = zip(np.split(ring, count), np.split(slots, count), strict=True)
        return RecurrentState(shape, ring, slots), [RecurrentState(shape, *part) for part in parts]

    def views(self, end: int, slots: Any = ()) -> tuple[Any, ...]:
        """The ring and some slots: views for a slice, else copies."""
        return self.ring[None], self.slots[None][:, slots]

    def copy(self, source: int, target: int, count: int) -> None:
        raise NotImplementedError("a recurrent state belongs to one sequence")

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError("a recurrent state has no pages")

    def pages(self) -> list[npt.NDArray[np.generic]]:
        raise NotImplementedError("a recurrent state has no pages")

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        raise NotImplementedError("a recurrent state has no positions to evict")

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """The rows of a step's tokens that are a path through its tree become those from `start` on."""
        at = (start + np.arange(len(rows))) % RING_ROWS
        self.ring[at] = self.ring[(start + np.asarray(rows)) % RING_ROWS]

    def before(self, step: RecurrentStep, start: int) -> npt.NDArray[Any]:
        """(tail_rows + pending, tail_width): the rows before a step at `start`; zeros before position 0."""
        rows, shape = self.pending_rows(step, start)[:, : self.shape.tail_width], self.shape
        tail = self.slots[step.source, : shape.tail_rows * shape.tail_width]
        tail = tail.reshape(shape.tail_rows, shape.tail_width)
        positions = np.arange(start - step.pending - shape.tail_rows, start - step.pending)
        return np.concatenate([np.where(positions[:, None] < 0, 0, tail), rows])

    def pending_rows(self, step: RecurrentStep, start: int) -> npt.NDArray[Any]:
        """(pending, row_width): the rows of the positions between the source slot's and `start`."""
        return np.asarray(self.ring[np.arange(start - step.pending, start) % RING_ROWS])

    def matrix(self, step: RecurrentStep, start: int) -> npt.NDArray[Any]:
        """(matrix,): the matrix of the source slot."""
        matrix = self.slots[step.source, self.shape.slot_width - self.shape.matrix :]
        return np.zeros_like(matrix) if start == step.pending else np.asarray(matrix)

    def write(
        self, step: RecurrentStep, start: int, rows: npt.NDArray[Any], matrix: npt.NDArray[Any] | None = None
    ) -> None:
        """Write the state after a step to the target slot, and its `rows` (tokens, row_width) to the ring."""
        shape, first = self.shape, max(0, len(rows) - RING_ROWS)
        tail = np.concatenate([self.before(step, start), rows[:, : shape.tail_width]])
        target = self.slots[step.target]
        target[: shape.tail_rows * shape.tail_width] = tail[len(tail) - shape.tail_rows :].reshape(-1)
        if matrix is not None:
            target[shape.slot_width - shape.matrix :] = matrix.reshape(-1)
        self.ring[np.arange(start + first, start + len(rows)) % RING_ROWS] = rows[first:]


class StateSlots:
    """Which slot has the state after which position. All blocks of a device use the same slots.

    `end`: number of positions that were processed.
    """

    def __init__(self, slots: int) -> None:
        self.count = slots
        self.end = 0
        self._clear()

    def _clear(self) -> None:
        self._positions: dict[int, int] = {}
        """Slot -> number of positions processed before."""
        self._checkpoints: set[int] = set()
        self._source = self._base = self._first_row = 0
        """The slot that the next step reads, its position, and the first position whose row is in the
        rings.
        """
        self._last: tuple[int, int] | None = None
        """The start of the last step and its number of tokens, negative of a tree."""
        self._step = RecurrentStep()

    def begin(self, start: int, tokens: int) -> RecurrentStep:
        """The slots of a step of `tokens` tokens at `start`; the same again if the step is the last one.

        Raises:
            ValueError: the state can't be rewound to `start`.
        """
        if (start, tokens) == self._last:
            return self._step
        if start != self.end and self.rewind(start) != start:
            raise ValueError(f"the recurrent state can't be rewound to {start}")
        target = self._free_slot()
        self._step = RecurrentStep(start - self._base, self._source, target)
        self.end = start + tokens
        self._first_row = max(self._first_row, self.end - RING_ROWS)
        self._source, self._base = target, self.end
        self._positions[target] = self.end
        self._last = start, tokens
        return self._step

    def begin_tree(self, start: int, tokens: int) -> RecurrentStep:
        """As `begin`, of a tree: the step writes the state before it to `target`. The end stays `start` until
        `keep_path`.
        """
        if (start, -tokens) == self._last:
            return self._step
        if start != self.end and self.rewind(start) != start:
            raise ValueError(f"the recurrent state can't be rewound to {start}")
        has_slot = self._base == start
        target = self._source if has_slot else self._free_slot()
        self._step = RecurrentStep(start - self._base, self._source, target)
        self._first_row = max(self._first_row, start + tokens - RING_ROWS)
        if not has_slot:
            self._source, self._base = target, start
            self._positions[target] = start
        self._last = start, -tokens
        return self._step

    def keep_path(self, tokens: int) -> None:
        """Continue with this many tokens of the last tree, whose rows are in the rings."""
        self.end, self._last = self.end + tokens, None

    def is_next(self, start: int) -> bool:
        """Whether a step at `start` reads the newest slot, without positions between."""
        return start == self.end == self._base

    def extend(self, tokens: int) -> None:
        """The last step was followed by this many single-token steps that wrote the same slot."""
        if tokens:
            self.end = self._base = self._positions[self._source] = self.end + tokens
            self._first_row = max(self._first_row, self.end - RING_ROWS)
            self._last = None

    def _free_slot(self) -> int:
        """A slot for the next state: neither a checkpoint nor the next step's source. The newest one is
        replaced, so that older ones remain, unless these are too close to each other.
        """
        free = [i for i in range(self.count) if i not in self._checkpoints and i != self._source]
        for slot in free:
            if slot not in self._positions:
                return slot
        free.sort(key=self._positions.__getitem__)
        is_old = self._base - self._positions[free[-2]] >= SAVE_POSITIONS
        return free[0] if is_old else free[-1]

    def checkpoint(self) -> None:
        """Keep the state after the last step until its position is dropped, or until there are too many
        checkpoints: then the one that is closest to its neighbors is given up.
        """
        if self._base != self.end or not self.end:
            return
        self._checkpoints.add(self._source)
        if len(self._checkpoints) > self.count - WORKING_SLOTS:
            slots = sorted(self._checkpoints, key=self._positions.__getitem__)
            at = [0, *(self._positions[slot] for slot in slots)]
            closest = min(range(len(slots) - 1), key=lambda index: at[index + 2] - at[index])
            self._checkpoints.discard(slots[closest])

    def reach(self, length: int) -> int:
        """How many positions `rewind` would keep."""
        if length >= self.end:
            return self.end
        base = max((position for position in self._positions.values() if position <= length), default=0)
        return base if base < self._first_row or length - base > RING_ROWS else length

    def rewind(self, length: int) -> int:
        """Drop all positions from `length` on; return how many of the others are kept."""
        if length >= self.end:
            return self.end
        self._last = None
        if length == 0:
            self.end = 0
            self._clear()
            return 0
        for slot in [slot for slot, position in self._positions.items() if position > length]:
            del self._positions[slot]
            self._checkpoints.discard(slot)
        best = max(self._positions, key=self._positions.__getitem__, default=None)
        self._base = 0 if best is None else self._positions[best]
        self._source = 0 if best is None else best
        if self._base < self._first_row or length - self._base > RING_ROWS:
            length = self._first_row = self._base
        self.end = length
        return length

    def stored(self) -> list[int]:
        """The slots of a snapshot: the next step's source and the checkpoints, by position."""
        slots = self._checkpoints | ({self._source} if self._base else set())
        return sorted(slots, key=self._positions.__getitem__)

    def description(self) -> npt.NDArray[np.int64]:
        """(1, n) int64, for a snapshot: the end, the first row in the rings, and the positions of
        `stored`.
        """
        return np.array([[self.end, self._first_row, *(self._positions[slot] for slot in self.stored())]])

    def restore(self, description: npt.NDArray[Any]) -> slice:
        """Take over the slots of a snapshot, in order of their positions; return where they are to be copied.

        Raises:
            ValueError: the snapshot is damaged, or has more slots.
        """
        values = description.reshape(-1).tolist()
        positions = values[2:]
        is_rising = all(0 < a < b for a, b in pairwise(positions))
        base = positions[-1] if positions else 0
        if len(values) < 2 or len(positions) > self.count - WORKING_SLOTS + 1 or not is_rising:
            raise ValueError("the snapshot is of another cache")
        end, first_row = values[:2]
        if not 0 <= base <= end <= base + RING_ROWS or not 0 <= first_row <= max(base, end):
            raise ValueError("the snapshot's recurrent state is damaged")
        self._clear()
        self._positions = dict(enumerate(positions))
        self._checkpoints = set(range(len(positions) - 1))
        self._source, self._base, self._first_row = max(0, len(positions) - 1), base, first_row
        self.end = end
        return slice(0, len(positions))
