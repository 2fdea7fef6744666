"""How the kernels of a decode step are cut, with defaults for models that no tuner has seen."""

from dataclasses import dataclass, replace
from typing import Any, Literal

MAX_SPLITS, FEW_SPLITS = 64, 16
"""Stretches of a cache that a step's buffers have room for, and that any cache may be cut into."""
STRETCH = 256
"""Positions for which a further stretch is worth what its programs take while the cache is short."""


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


RowKernel = Literal["qkv", "output", "gated", "down", "head"]
"""What the rows of a matrix are for; `output` and `down` add to the residual stream, the others read it."""


@dataclass(frozen=True)
class Tuning:
    """The shapes of a step's kernels; the defaults were best or near it on an H200.

    A step of several tokens has two shapes: for kernels that read the residual stream, which have many rows,
    and for those that add to it, whose few rows are as long or longer.
    """

    qkv: Shape = Shape()
    output: Shape = Shape(128, 8)
    gated: Shape = Shape()
    down: Shape = Shape()
    head: Shape = Shape(128, 8)
    two: Shape = Shape(64, 4)
    two_adding: Shape = Shape(64, 4)
    four: Shape = Shape(32, 2, 2)
    """Of three or four tokens."""
    four_adding: Shape = Shape(64, 4, 2)
    eight: Shape = Shape(32, 4, 1)
    """Of more."""
    eight_adding: Shape = Shape(32, 4, 1)
    splits: int = MAX_SPLITS
    """Stretches of a cache at most."""
    positions: int = 32
    attention_warps: int = 2

    def shape(self, kernel: RowKernel, tokens: int) -> Shape:
        """How a kernel of rows is cut in a step of so many tokens."""
        if tokens == 1:
            shape: Shape = getattr(self, kernel)
            return shape
        adding = kernel in ("output", "down")
        if tokens == 2:
            return self.two_adding if adding else self.two
        if tokens <= 4:
            return self.four_adding if adding else self.four
        return self.eight_adding if adding else self.eight

    def splits_for(self, positions: int) -> int:
        """Stretches that a cache with room for so many positions is cut into."""
        return min(self.splits, max(FEW_SPLITS, next_power_of_two(positions // STRETCH)))

    def replace(self, **changes: Any) -> "Tuning":
        return replace(self, **changes)


def usual_tuning(capability: int) -> Tuning:
    """The cuts for a GPU that nothing has been tried on; `capability`: ten times its compute capability.

    Before 80 a product of tensor cores is half as deep, and a thread holds more of a tile: with the tiles of
    others it would spill kilobytes.
    """
    return Tuning() if capability >= 80 else Tuning(positions=16, attention_warps=4)
