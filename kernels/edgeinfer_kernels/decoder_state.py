"""The state of a decoder's blocks in main memory, which later tokens need, and the record of a step's
experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.block import BlockState
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.recent_rows import RewindLimit


def check_evicted(positions: npt.NDArray[np.int64], end: int) -> None:
    """Raise `ValueError` if some of `positions` do not exist or are not ascending."""
    if len(positions) == 0 or positions[0] < 0 or positions[-1] >= end or (np.diff(positions) <= 0).any():
        raise ValueError(f"saw positions {positions[:3]}… to evict, wanted rising ones of {end}")


@dataclass(frozen=True)
class DecoderState:
    """The states of some blocks, in the order of the blocks."""

    blocks: Mapping[BlockIndex, BlockState] = field(default_factory=dict)
    rewind_limit: RewindLimit = field(default_factory=lambda: RewindLimit(0))

    @classmethod
    def allocate(
        cls,
        spec: DecoderSpec,
        context: int,
        kind: CacheType = "f16",
        indices: Sequence[BlockIndex] | None = None,
    ) -> "DecoderState":
        """The zeroed state for `context` tokens of these blocks; None: of all."""
        states = {}
        for index in spec.indices() if indices is None else indices:
            state = spec.residual(index).block.allocate_state(context, kind)
            if state is not None:
                states[index] = state
        return cls(states, RewindLimit(spec.recurrent_rows))

    @staticmethod
    def nbytes_for(spec: DecoderSpec, context: int, kind: CacheType) -> int:
        """Bytes that `allocate` takes for all blocks."""
        blocks = [residual.block for layer in spec.layers for residual in layer.blocks]
        return sum(block.state_nbytes(context, kind) for block in blocks)

    def get(self, index: BlockIndex) -> BlockState | None:
        """The state of a block; None: it has none here."""
        return self.blocks.get(index)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.blocks.values())

    def snapshot(self, end: int) -> list[npt.NDArray[np.generic]]:
        """Views of the first `end` positions of all blocks."""
        return [view for state in self.blocks.values() for view in state.views(end)]

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> int:
        """Restore the first `end` positions from the arrays of a `snapshot`, which may hold more of both;
        return the number of arrays used.

        Raises:
            ValueError: the arrays have other shapes or dtypes.
        """
        views = self.snapshot(end)
        trimmed = [array[:, : view.shape[1]] for view, array in zip(views, arrays, strict=False)]
        if [(each.shape, each.dtype) for each in trimmed] != [(each.shape, each.dtype) for each in views]:
            raise ValueError("the snapshot is of another cache")
        for view, array in zip(views, trimmed, strict=True):
            view[...] = array
        self.rewind_limit.restored(end)
        return len(views)

    def rewind(self, length: int, end: int | None) -> int:
        """As `Backend.rewind`."""
        kept, restores = self.rewind_limit.rewind(length, end)
        if restores:
            for state in self.blocks.values():
                state.restore_checkpoint(kept)
        return kept

    def restore_all(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """As `restore`. Raises `ValueError` too if arrays are left over."""
        if self.restore(arrays, end) != len(arrays):
            raise ValueError("the snapshot is of another cache")

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` positions in all blocks; the ranges must not overlap."""
        for state in self.blocks.values():
            state.copy(source, target, count)

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """As `Backend.evict`."""
        check_evicted(positions, end)
        for state in self.blocks.values():
            state.evict(positions, end)


NO_EXPERTS = -1


@dataclass(frozen=True)
class Routing:
    """Buffer that a backend fills with routing results if it is passed at load time; this has no extra cost.

    `ids` (layers, tokens, experts_per_token) int64: the experts of the last step's tokens, highest score
    first; NO_EXPERTS in layers without experts. Rows beyond the step's tokens hold data of older steps.
    """

    ids: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, spec: DecoderSpec, batch: int) -> "Routing":
        """A buffer for steps of at most `batch` tokens."""
        experts_per_token = max((block.experts_per_token for block in spec.specs(MoeSpec)), default=0)
        return cls(np.full((len(spec.layers), batch, experts_per_token), NO_EXPERTS, np.int64))
