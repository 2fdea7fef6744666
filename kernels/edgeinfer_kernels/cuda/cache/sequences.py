"""The sequences whose states a device holds: where each of them is in the caches and in recurrent states."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.caches.layer_cache import SPARE_POSITIONS
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.cache.layout import PAGES, TEXT, Layout
from edgeinfer_kernels.decoder_state import DecoderState, StatePool
from edgeinfer_kernels.recurrent_state import RecurrentStep, StateSlots

NO_STEP = RecurrentStep()
"""Of a model without recurrent states."""


class DeviceSequence:
    """A sequence with `positions` in the KV caches, one after the other, and with its slots and its ring in
    each recurrent state. The first sequence is a text from the first position on, the others are in pages.
    """

    def __init__(self, number: int, positions: int, slots: StateSlots | None) -> None:
        self.slots = slots
        self.first = number * positions
        """Its first position in the caches."""
        self.layout: Layout = PAGES if number else TEXT
        self.number = number
        self.states_at = 0
        """Of a draft head: the row of its target's state that belongs to position 0."""
        self._pages = np.arange(self.first // PAGE, (self.first + positions) // PAGE)

    def pages(self, end: int) -> npt.NDArray[np.int64]:
        """(pages,): those of the first `end` positions."""
        return self._pages[: -(-end // PAGE)]

    def words(self, start: int, tokens: int, *, is_tree: bool = False) -> tuple[int, ...]:
        """What kernels read of the sequence in a step, as in `cuda_buffers.py`. Slots are numbered through
        all sequences. `is_tree`: of a draft tree.

        Raises:
            ValueError: the recurrent state can't be rewound to `start`.
        """
        if self.slots is None:
            return start, *NO_STEP, tokens, 0
        begin = self.slots.begin_tree if is_tree else self.slots.begin
        step, before = begin(start, tokens), self.number * self.slots.count
        ring = self.number * RING_ROWS
        return start, step.pending, before + step.source, before + step.target, tokens, ring


class DeviceSequences:
    """All sequences of a device, whose `context` is as `pool_positions` counts it; `slots`: of each recurrent
    state, 0: none is recurrent.
    """

    def __init__(self, count: int, context: int, slots: int) -> None:
        own = (context + SPARE_POSITIONS) // count
        states = [DecoderState({}, StateSlots(slots) if slots else None) for _ in range(count)]
        self.pool = StatePool(states, DecoderState())
        """The states as engines get them: they have no arrays in main memory."""
        self.each = [DeviceSequence(number, own, state.slots) for number, state in enumerate(states)]
        self._spare_slot = count * slots

    def number_of(self, state: DecoderState) -> int:
        """The number of the sequence with a state of the pool."""
        return next(number for number, each in enumerate(self.pool.states) if each is state)

    @property
    def padding(self) -> tuple[int, ...]:
        """The words of a batch's padding, as `DeviceSequence.words`: it has no tokens, and writes a slot that
        no sequence has.
        """
        return 0, 0, self._spare_slot, self._spare_slot, 0, 0

    def positions(self, starts: Sequence[int], numbers: Sequence[int]) -> BatchPositions:
        """The positions and pages of some sequences for one token of each."""
        pages = [self.each[number].pages(max(starts) + 1) for number in numbers]
        return BatchPositions(np.array(starts), np.stack(pages))

    def batch(self, starts: Sequence[int], numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The words of some sequences for one token of each.

        Raises:
            ValueError: a recurrent state isn't at the position.
        """
        words = [self.each[number].words(start, 1) for start, number in zip(starts, numbers, strict=True)]
        for number, (_, pending, *_) in zip(numbers, words, strict=True):
            if pending:
                raise ValueError(f"state {number}: saw {pending} positions after its slot, wanted none")
        return words
