"""Drafting with a block drafter on the GPU of its target, which finds the candidates of all rows at once."""

from collections.abc import Callable, Sequence
from typing import Any

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.layers.block_drafts import BlockDraftModel
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.block_drafter import BlockDrafter
from edgeinfer.speculation.trees.tree_growth import Candidates, grow_levels


class DeviceBlockDrafter(BlockDrafter):
    """The drafter on `backend`. As those of `DeviceHead`, draft tokens are the most probable ones, whatever
    the sampling parameters except the temperature.
    """

    def __init__(
        self,
        backend: Any,
        target: NativeEngine,
        model: BlockDraftModel,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        batch: int = 1,
        tree_width: int = 1,
    ) -> None:
        super().__init__([backend], target, model, nbytes, on_close, batch, tree_width)
        self._candidates_of_rows: Callable[[Sequence[int], int, int, float], list[Candidates]]
        self._candidates_of_rows = backend.candidates

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`; no more levels than a block drafts."""
        self._length = min(request.max_tokens, self._model.max_drafted)
        position = self._begin(history) if self._length else None
        if position is None:
            return Draft()
        is_tree = request.max_nodes > 0
        power = request.sharpness / (request.params.temperature or 1.0) if is_tree else 1.0
        width = self.tree_width if is_tree else 1
        found = self._candidates_of_rows(self._block(history), position, width, power)
        levels = [[each for each in best if each[0] < self._vocabulary_size] for best in found]
        return grow_levels(request, width, levels[len(levels) - self._length :])
