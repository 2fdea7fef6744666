"""The hidden states that a target on a GPU keeps of its last positions, for a draft head there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena


@dataclass(frozen=True)
class StateRing:
    """The state of position p is row p % positions.

    `rows`: (positions, hidden_size), after the output norm. With `layers` they are those after these numbers
    of layers, side by side, without a norm.
    """

    rows: Tensor
    layers: tuple[int, ...] = ()

    @classmethod
    def take(cls, arena: Arena, positions: int, width: int, layers: tuple[int, ...]) -> "StateRing | None":
        """Allocate the ring; None: no states are kept."""
        if not positions:
            return None
        return cls(arena.take((positions, width * max(1, len(layers))), torch.float32), layers)

    def after(self, layers: int, count: int) -> list[Tensor]:
        """Views of the rows that have the states after this number of layers, of `count` in all."""
        if not self.layers:
            return [self.rows] if layers == count else []
        width = self.rows.shape[1] // len(self.layers)
        firsts = [width * index for index, each in enumerate(self.layers) if each == layers]
        return [self.rows[:, first : first + width] for first in firsts]
