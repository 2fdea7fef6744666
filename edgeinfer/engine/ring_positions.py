"""Which positions ring caches hold, and to which lengths a text with such caches can be rewound."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.caches.ring_cache import RING_SPARE
from edgeinfer_kernels.decoder import DecoderSpec


class RingPositions:
    """The positions that the ring caches of a decoder hold; without any, it holds all.

    A token at the end of a text reads the `window` - 1 positions before it, so a text can be rewound to a
    length if these are still in the rings; all rings of one shape hold the same positions.
    """

    def __init__(self, spec: DecoderSpec, context: int) -> None:
        attention = [block for block in spec.specs(AttentionSpec) if block.has_ring(context)]
        self.shapes = sorted({(block.window, block.ring) for block in attention})
        """(window, positions) of each ring."""
        self.first = [0] * len(self.shapes)
        """The first position that each ring holds."""

    def extend(self, end: int) -> None:
        """The positions before `end` have been written."""
        for index, (_, ring) in enumerate(self.shapes):
            self.first[index] = max(self.first[index], end + RING_SPARE - ring)

    def can_rewind(self, length: int) -> bool:
        """Whether tokens can be processed after the first `length` ones."""
        pairs = zip(self.first, self.shapes, strict=True)
        return length == 0 or all(not first or first + window <= length for first, (window, _) in pairs)

    def rewind(self, length: int) -> int:
        """Drop all positions from `length` on; return how many of the others are kept: all or none."""
        if length and self.can_rewind(length):
            return length
        self.first = [0] * len(self.shapes)
        return 0

    def evict(self, indices: Sequence[int], end: int) -> bool:
        """The tokens at `indices` (ascending) of `end` tokens have been evicted; return whether tokens can be
        processed after the others.
        """
        for index, first in enumerate(self.first):
            self.first[index] = first - int(np.searchsorted(np.asarray(indices, np.int64), first))
        return self.can_rewind(end - len(indices))

    def description(self) -> npt.NDArray[np.int64]:
        """(1, shapes) int64: `first`, for a snapshot."""
        return np.array([self.first], np.int64)

    def of_snapshot(self, arrays: Sequence[npt.NDArray[np.generic]]) -> "RingPositions | None":
        """The rings of a snapshot, whose first array is their `description`; None: it is of another cache."""
        if not arrays or arrays[0].dtype != np.int64 or arrays[0].shape != (1, len(self.shapes)):
            return None
        rings = copy(self)
        rings.restore(arrays[0])
        return rings if min(rings.first) >= 0 else None

    def restore(self, description: npt.NDArray[np.generic]) -> None:
        """The rings hold what those of a snapshot held."""
        self.first = np.asarray(description).reshape(-1).tolist()
