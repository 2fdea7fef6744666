"""Steps of one token of each of several states: their arguments for the kernels."""

from collections.abc import Sequence
from ctypes import addressof

import numpy as np

from edgeinfer_kernels.caches.layer_cache import LANES
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, TokenArgs
from edgeinfer_kernels.cpu.runtime.schedule import Pages, StepSchedules, fill_slots
from edgeinfer_kernels.decoder_state import StatePool

FIRST_PAGES = 256
"""Pages of a table at first; it doubles when a position is beyond."""


class StatePages:
    """The cache pages of `states` states in caches that hold them one after the other; `pages`: as
    `StatePool.page_table`.
    """

    def __init__(self, pages: Pages, states: int) -> None:
        self._pages, self._states = pages, states
        self._extend(FIRST_PAGES)

    def _extend(self, count: int) -> None:
        """Build the table, (states, count): the pages of each state, where a ring starts again."""
        of_state, ring = self._pages or (0, 1)
        first = of_state * np.arange(self._states)[:, None]
        self._table = first + np.arange(count) % ring
        self._address, self._stride = address(self._table), self._table.strides[0]

    def rows(self, position: int) -> tuple[int, int]:
        """The address of the first state's pages up to a position, and the bytes between two states."""
        count = self._table.shape[1]
        while count * LANES <= position:
            count *= 2
        if count > self._table.shape[1]:
            self._extend(count)
        return self._address, self._stride


class JoinedStates:
    """The states of a pool, for the kernels of `schedules`: attention reads the caches by pages, a recurrent
    block the rows and slots of each token's state.
    """

    def __init__(self, pool: StatePool, schedules: StepSchedules) -> None:
        self._states, self._schedules = pool.states, schedules
        self._each = (StepArgs * STEP_TOKENS)()
        self._tokens = [(TokenArgs * STEP_TOKENS)() for _ in schedules.pages]
        self._pages = [StatePages(pages, len(pool.states)) for pages in schedules.pages]

    def fill(self, x: int, starts: Sequence[int], states: Sequence[int]) -> None:
        """Fill all calls for tokens at these positions of the states, whose rows are at `x`.

        Raises:
            ValueError: a recurrent state isn't at the position.
        """
        first, last = min(starts), max(starts)
        is_recurrent = self._states[0].slots is not None
        if is_recurrent:
            self._fill_slots(starts, states)
        self._schedules.fill(len(starts), first, span=last + 1 - first, x=x)
        recent = {state: self._recent(state, start) for start, state in zip(starts, states, strict=True)}
        calls = zip(self._schedules.step_args, self._tokens, self._pages, strict=True)
        for (_, args), tokens, pages in calls:
            at, stride = pages.rows(last)
            for token, start, state in zip(tokens, starts, states, strict=False):
                token.position, token.pages = start, at + stride * state
                token.recent = recent[state]
            args.token_args, args.each = addressof(tokens), addressof(self._each) if is_recurrent else 0

    def _recent(self, state: int, start: int) -> int:
        """The address of the slots of a state's recent positions, for a token at `start`; 0: it has none."""
        recent = self._states[state].recent
        if recent is None:
            return 0
        recent.touch(start, 1)
        return address(recent.joined)

    def _fill_slots(self, starts: Sequence[int], states: Sequence[int]) -> None:
        """The steps of all tokens; slots are numbered through all states."""
        for row, (start, number) in enumerate(zip(starts, states, strict=True)):
            args, slots = self._each[row], self._states[number].slots
            assert slots is not None
            step, before = slots.begin(start, 1), number * slots.count
            if step.pending:
                raise ValueError(f"state {number}: saw {step.pending} positions after its slot, wanted none")
            fill_slots(args, step._replace(source=step.source + before, target=step.target + before))
            args.start, args.tokens, args.first, args.state = start, 1, row, number
