"""A decoder cut in two: the lower layers in main memory, the upper ones and the head on a GPU.

A row of the residual stream crosses once a token, width · 4 bytes, however many layers lie on either side.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, Backend, Rows


class UpperLayers(Protocol):
    """The GPU's half, as `edgeinfer_kernels.cuda.backend.CudaBackend` without an embedding."""

    batch: int
    most_recent: int

    def enter(self, x: Activations, start: int) -> Rows:
        """Rows from below the first of its layers, at positions start…, to above the last."""
        ...

    def choose_above(
        self, x: Activations, start: int, draw: Sequence[float] | None, recent: Sequence[int]
    ) -> int:
        """The token that follows the one whose row x is; -1: the host has to sample."""
        ...

    def draw_request(self, settings: Any, recent: int, chance: float) -> list[float]: ...

    def logits(self, x: Any) -> npt.NDArray[np.float32]: ...

    def normed(self, x: Any) -> npt.NDArray[np.float32]: ...

    def close(self) -> None: ...


class RowsBetween:
    """Rows of the residual stream on their way: in main memory, then on the GPU."""

    def __init__(self, below: Activations) -> None:
        self.below = below
        self.above: Rows | None = None

    def __len__(self) -> int:
        return len(self.below)

    def __getitem__(self, part: slice) -> "RowsBetween":
        rows = RowsBetween(self.below[part])
        rows.above = None if self.above is None else self.above[part]
        return rows


class SplitBackend:
    """`lower` has the embedding and the first layers, `upper` all others and the head."""

    name = "split"

    def __init__(self, lower: Backend[Activations], upper: UpperLayers) -> None:
        self.lower = lower
        self.upper = upper
        self.most_recent = upper.most_recent

    def embed(self, ids: Sequence[int]) -> RowsBetween:
        return RowsBetween(self.lower.embed(ids))

    def all_layers(self, x: RowsBetween, start: int) -> None:
        self.lower.all_layers(x.below, start)
        x.above = self.upper.enter(x.below, start)

    def logits(self, x: RowsBetween) -> npt.NDArray[np.float32]:
        if x.above is None:
            raise ValueError("these rows have not been up all layers")
        return self.upper.logits(x.above)

    def normed(self, x: RowsBetween) -> npt.NDArray[np.float32]:
        if x.above is None:
            raise ValueError("these rows have not been up all layers")
        return self.upper.normed(x.above)

    def choose(
        self,
        token_id: int,
        start: int,
        draw: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        following: Sequence[float] | None = None,
        room: bool = True,
    ) -> int:
        """Read one token at `start` and choose the next on the GPU; -1: the host has to sample.

        The GPU can't run ahead, as main memory has the next token's embedding: `following` and `room` are
        what `CudaBackend.choose` takes.
        """
        x = self.lower.embed([token_id])
        self.lower.all_layers(x, start)
        return self.upper.choose_above(x, start, draw, recent)

    def draw_request(self, settings: Any, recent: int, chance: float) -> list[float]:
        """One draw as `choose` takes it."""
        return self.upper.draw_request(settings, recent, chance)

    def close(self) -> None:
        try:
            self.upper.close()
        finally:
            self.lower.close()
