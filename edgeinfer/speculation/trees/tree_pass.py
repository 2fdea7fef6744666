"""Verifies a draft tree in one forward: each token attends to the text and to the tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.speculation.drafter import Draft
from edgeinfer.speculation.trees.tree_pages import TreePages
from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.caches.ring_cache import RING_SPARE


@dataclass(frozen=True)
class TreePass:
    """The forward of one tree after the engine's text. Row 0 is the last token of the text, row 1 + i token i
    of the draft.
    """

    engine: NativeEngine
    draft: Draft
    pages: TreePages

    @staticmethod
    def is_possible(engine: Engine) -> bool:
        """Whether the engine verifies trees: it keeps keys and values of positions only, in main memory."""
        if not isinstance(engine, NativeEngine):
            return False
        return engine.capabilities.copies_in_batch and engine.capabilities.max_batch_tokens > 0

    @classmethod
    def of(cls, engine: Engine, draft: Draft) -> "TreePass | None":
        """None: the draft is no tree, or the engine can't process or store it."""
        if not draft.parents or not isinstance(engine, NativeEngine) or not cls.is_possible(engine):
            return None
        start = len(engine.ids)
        pages = TreePages(draft.parents, start)
        few = 1 + len(draft.ids) <= engine.capabilities.max_batch_tokens
        fits = pages.end_page <= -(-engine.context // PAGE) and max(pages.positions) < engine.context
        if engine.cache.rings is not None:
            fits = fits and pages.end_page * PAGE - start <= RING_SPARE
        return cls(engine, draft, pages) if fits and few else None

    def read(self, last: int) -> npt.NDArray[np.float32]:
        """Logits (1 + len(draft.ids), vocabulary) after `last` and after each token."""
        self.engine.cache.reserve(self.pages.end_page * PAGE)
        for source, target, count in self.pages.copied_text():
            self.engine.backend.copy_positions(source, target, count)
        return self.engine.append_batch([last, *self.draft.ids], self.pages.batch())

    def keep(self, last: int, path: Sequence[int]) -> None:
        """Continue the text with `last` and the tokens of a path, which are moved after it."""
        rows = [0, *(1 + node for node in path)]
        moved = [(self.pages.slot(row), self.pages.positions[row]) for row in rows]
        for source, target, count in _runs([pair for pair in moved if pair[0] != pair[1]]):
            self.engine.backend.copy_positions(source, target, count)
        self.engine.keep_rows([last, *(self.draft.ids[node] for node in path)], rows)


def _runs(moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, count) of moves of one position each; consecutive ones together."""
    runs = list[tuple[int, int, int]]()
    for source, target in moves:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
