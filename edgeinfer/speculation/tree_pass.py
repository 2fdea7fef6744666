"""Verifies a tree draft in one forward: each sibling attends to the trunk before its position, and itself."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.speculation.drafts import Draft
from edgeinfer_kernels.backend import PAGE, PackingBackend, Places


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
        leaves = len(draft.leaves)
        if not leaves or not isinstance(engine, NativeEngine) or not engine.cache.layers:
            return None
        if not isinstance(engine.backend, PackingBackend):
            return None
        start = len(engine.ids)
        first_page = -(-(start + 1 + len(draft.ids)) // PAGE)
        fits = first_page + leaves <= -(-engine.context // PAGE)
        few = 1 + len(draft.ids) + leaves <= engine.backend.most_placed
        return cls(engine, draft, start, first_page) if fits and few else None

    def read(self, last: int) -> npt.NDArray[np.float32]:
        """Logits (1 + len(draft.ids) + leaves, vocabulary) after `last`, the trunk, and the siblings."""
        ids, leaves = self.draft.ids, self.draft.leaves
        for leaf, (place, _) in enumerate(leaves):
            begin = self._position(place) // PAGE * PAGE
            for layer in self.engine.cache.layers if begin < self.start else ():
                layer.copy(begin, self._page(leaf) * PAGE, self.start - begin)
        branch = [self.start + row for row in range(1 + len(ids))]
        positions = [*branch, *(self._position(place) for place, _ in leaves)]
        pages = np.tile(np.arange(max(positions) // PAGE + 1), (len(positions), 1))
        for leaf, (place, _) in enumerate(leaves):
            pages[1 + len(ids) + leaf, self._position(place) // PAGE] = self._page(leaf)
        copies = (*(self._copies(position) for position in branch), *(() for _ in leaves))
        logits = self.engine.read_at(
            [last, *ids, *(token for _, token in leaves)], Places(np.array(positions), pages, copies)
        )
        self.engine.cache.append([last, *ids])
        return logits

    def keep(self, leaf: int | None) -> None:
        """Replace the trunk's token at a sibling's position by the sibling; None: keep the trunk."""
        if leaf is None:
            return
        place, token = self.draft.leaves[leaf]
        position = self._position(place)
        for layer in self.engine.cache.layers:
            layer.copy(self._page(leaf) * PAGE + position % PAGE, position, 1)
        self.engine.cache.ids[position] = token

    def _position(self, place: int) -> int:
        return self.start + 1 + place

    def _page(self, leaf: int) -> int:
        return self.first_page + leaf

    def _copies(self, position: int) -> tuple[int, ...]:
        """Additional targets for the trunk's key and value at a position: pages of later siblings."""
        return tuple(
            self._page(leaf) * PAGE + position % PAGE
            for leaf, (place, _) in enumerate(self.draft.leaves)
            if position < self._position(place) and position // PAGE == self._position(place) // PAGE
        )
