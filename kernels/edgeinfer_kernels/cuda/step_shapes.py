"""How the kernels of a decode step are cut, with defaults for models that no tuner has seen."""

from dataclasses import dataclass, replace
from typing import Any

MOST_SPLITS = 64
"""Stretches of a cache that a step's buffers have room for."""


def next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Shape:
    """How a kernel is cut: blocks of a row at a time and warps of a program; 0: what does well anywhere.

    `vector`: blocks side by side that a thread takes in a step of several tokens.
    """

    step: int = 0
    warps: int = 0
    vector: int = 4

    def step_for(self, blocks: int) -> int:
        return min(self.step or 64, next_power_of_two(blocks))

    def warps_for(self, blocks: int) -> int:
        return self.warps or max(1, self.step_for(blocks) // 16)


@dataclass(frozen=True)
class Tuning:
    """The shapes of a step's kernels; the defaults were best or near it on an H200."""

    qkv: Shape = Shape()
    output: Shape = Shape(128, 8)
    gated: Shape = Shape()
    down: Shape = Shape()
    head: Shape = Shape(128, 8)
    two: Shape = Shape(32, 2, 2)
    """Of all of these in a step of two tokens."""
    four: Shape = Shape(16, 2, 1)
    """Of all of these in a step of three or four."""
    eight: Shape = Shape(16, 2, 1)
    """Of all of these in a step of more."""
    splits: int = 16
    positions: int = 32
    attention_warps: int = 2

    def several(self, tokens: int) -> Shape:
        """The shape of every kernel of rows in a step of more than one token."""
        return self.two if tokens <= 2 else self.four if tokens <= 4 else self.eight

    def replace(self, **changes: Any) -> "Tuning":
        return replace(self, **changes)
