"""Verifies a tree draft in one forward: each sibling attends to the trunk before its position, and itself."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.speculation.drafter import Draft
from edgeinfer_kernels.backend import PAGE, BatchPositions


@dataclass(frozen=True)
class TreePass:
    """The forward of one tree draft after the engine's text.

    The trunk is stored after the text. A sibling's page is a copy of the page that contains its position,
    placed after all of that. Keys and values that the trunk writes to that page in the same forward are
    written to the copies too.
    """

    engine: NativeEngine
    draft: Draft
    start: int
    """Position of the token before the draft."""
    first_page: int
    """The page of the first sibling; each has a separate page."""

    @classmethod
    def of(cls, engine: Engine, draft: Draft) -> "TreePass | None":
        """None: the draft has no siblings, or the engine can't process or store them."""
        siblings = len(draft.sibling_tokens)
        if not siblings or not isinstance(engine, NativeEngine):
            return None
        start = len(engine.ids)
        first_page = -(-(start + 1 + len(draft.ids)) // PAGE)
        fits = first_page + siblings <= -(-engine.context // PAGE)
        can = engine.capabilities
        few = can.copies_in_batch and 1 + len(draft.ids) + siblings <= can.max_batch_tokens
        return cls(engine, draft, start, first_page) if fits and few else None

    def read(self, last: int) -> npt.NDArray[np.float32]:
        """Logits (1 + len(draft.ids) + siblings, vocabulary) after `last`, the trunk, and the siblings."""
        ids, siblings = self.draft.ids, self.draft.sibling_tokens
        self.engine.cache.reserve((self.first_page + len(siblings)) * PAGE)
        for sibling, (index, _) in enumerate(siblings):
            begin = self._position(index) // PAGE * PAGE
            if begin < self.start:
                self.engine.backend.copy_positions(begin, self._page(sibling) * PAGE, self.start - begin)
        trunk = [self.start + row for row in range(1 + len(ids))]
        positions = [*trunk, *(self._position(index) for index, _ in siblings)]
        pages = np.tile(np.arange(max(positions) // PAGE + 1), (len(positions), 1))
        for sibling, (index, _) in enumerate(siblings):
            pages[1 + len(ids) + sibling, self._position(index) // PAGE] = self._page(sibling)
        copies = (*(self._copies(position) for position in trunk), *(() for _ in siblings))
        logits = self.engine.append_batch(
            [last, *ids, *(token for _, token in siblings)],
            BatchPositions(np.array(positions), pages, copies),
        )
        self.engine.cache.append([last, *ids])
        return logits

    def keep(self, sibling: int | None) -> None:
        """Replace the trunk's token at a sibling's position by the sibling; None: keep the trunk."""
        if sibling is None:
            return
        index, token = self.draft.sibling_tokens[sibling]
        position = self._position(index)
        self.engine.backend.copy_positions(self._page(sibling) * PAGE + position % PAGE, position, 1)
        self.engine.cache.ids[position] = token

    def _position(self, index: int) -> int:
        return self.start + 1 + index

    def _page(self, sibling: int) -> int:
        return self.first_page + sibling

    def _copies(self, position: int) -> tuple[int, ...]:
        """Additional targets for the trunk's key and value at a position: pages of later siblings."""
        return tuple(
            self._page(sibling) * PAGE + position % PAGE
            for sibling, (index, _) in enumerate(self.draft.sibling_tokens)
            if position < self._position(index) and position // PAGE == self._position(index) // PAGE
        )
