"""Per-call arguments: the addresses of the tokens' hidden states, their positions, and the RoPE tables."""

from ctypes import addressof

import numpy as np

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.rope import RopeSpec
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, TokenArgs

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


def fill_step(
    step: StepArgs, x: int, stride: int, tokens: int, start: int, rope: int, token_args: int = 0
) -> None:
    """Fill the arguments for tokens whose rows are at `x`, `stride` bytes apart; `rope` is 0 without RoPE.

    `token_args`: 0, or the address of a `PositionTable`.
    """
    step.x, step.x_stride, step.tokens = x, stride, tokens
    step.start, step.rope, step.token_args = start, rope, token_args


class PositionTable:
    """The arguments of some tokens, at `address`."""

    def __init__(self, positions: BatchPositions) -> None:
        self._pages = np.ascontiguousarray(positions.pages, np.int64)
        self._copies = [np.array([*copies, -1], np.int64) for copies in positions.copies]
        self._tokens = (TokenArgs * len(positions.positions))()
        pages, stride = address(self._pages), self._pages.strides[0]
        for index, (token, position) in enumerate(
            zip(self._tokens, positions.positions.tolist(), strict=True)
        ):
            token.position, token.pages = position, pages + stride * index
        for token, copies in zip(self._tokens, self._copies, strict=False):
            token.copies = address(copies)
        self.address = addressof(self._tokens)
