"""What all blocks with a recurrent state have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, RING_ROWS, ROWS_SCRATCH, STEP_TOKENS
from edgeinfer_kernels.recurrent_state import RecurrentShape, RecurrentState
from edgeinfer_kernels.sizes.cuda_matrices import taken


class RecurrentSpec:
    """Base of the specifications of blocks with a recurrent state; subclasses have a field `slots`, which
    `DecoderSpec.with_slots` sets.
    """

    head_shape: ClassVar[tuple[int, ...]] = ()
    is_divisible: ClassVar[bool] = False
    source_layer: ClassVar[None] = None
    takes_trees: ClassVar[bool] = False
    """Whether the tokens of a step can be a draft tree."""

    @property
    def recurrent(self) -> RecurrentShape:
        """The sizes of the state."""
        raise NotImplementedError

    def state_nbytes(self, context: int, cache_type: CacheType) -> int:
        return self.recurrent.nbytes

    def allocate_state(self, context: int, cache_type: CacheType) -> RecurrentState:
        return self.recurrent.allocate()


@dataclass(frozen=True)
class RecurrentSizes(BlockSizes):
    """A block with a recurrent state, whose size doesn't depend on the context."""

    state_label: ClassVar[str] = "recurrent state"

    spec: Any

    @property
    def _shape(self) -> RecurrentShape:
        found: RecurrentShape = self.spec.recurrent
        return found

    @property
    def is_recurrent(self) -> bool:
        return True

    def state_bytes(self, context: int, cache_type: CacheType) -> int:
        return self._shape.nbytes

    def cpu_scratch(self) -> int:
        """For products, or for a piece of the state that a thread updates, before a tree and after each of
        its tokens.
        """
        pieces = 1 + STEP_TOKENS if self.spec.takes_trees else 1
        return max(ROWS_SCRATCH, CACHE_LINE * pieces * self._shape.piece_rows)

    def state_share(self, depth: int, context: int) -> float:
        """A token reads a slot and writes one."""
        return 8 * self._shape.slot_width / self._shape.nbytes

    def state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        return self.states_device_bytes(context, 1, cache_type)

    def states_device_bytes(self, context: int, sequences: int, cache_type: CacheType) -> int:
        """Of several sequences with a slot for the padding of batches."""
        shape, padding = self._shape, int(sequences > 1)
        rings, slots = sequences * RING_ROWS, sequences * shape.slots + padding
        return taken(rings * shape.row_width, 4) + taken(slots * shape.slot_width, 4)

    def has_device_pages(self, context: int) -> bool:
        return True

    @classmethod
    def streamed_state_bytes(cls, blocks: Sequence[Self], context: int) -> int:
        """The ring and two slots of the largest block."""
        shape = max((block.spec.recurrent for block in blocks), key=lambda each: int(each.slot_width))
        return taken(RING_ROWS * shape.row_width, 4) + taken(2 * shape.slot_width, 4)
