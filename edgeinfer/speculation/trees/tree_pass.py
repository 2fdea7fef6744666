"""Verifies a draft tree in one forward: each token attends to the text and to the tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.drafter import Draft


@dataclass(frozen=True)
class TreePass:
    """The forward of one tree after the engine's text. Row 0 is the last token of the text, row 1 + i token i
    of the draft.
    """

    engine: NativeEngine
    draft: Draft

    @staticmethod
    def max_nodes(engine: Engine) -> int:
        """How many draft tokens of a tree the engine verifies; 0: none."""
        return max(0, engine.capabilities.max_tree_tokens - 1) if isinstance(engine, NativeEngine) else 0

    @classmethod
    def of(cls, engine: Engine, draft: Draft) -> "TreePass | None":
        """None: the draft is no tree, or the engine can't process or store it."""
        if not draft.parents or not isinstance(engine, NativeEngine) or not cls.max_nodes(engine):
            return None
        return cls(engine, draft) if engine.holds_tree(draft.parents) else None

    def read(self, last: int) -> npt.NDArray[np.float32]:
        """Logits (1 + len(draft.ids), vocabulary) after `last` and after each token."""
        return self.engine.append_tree([last, *self.draft.ids], self.draft.parents)

    def best(self, last: int) -> list[int] | None:
        """The ids of the largest logits of each row, as `Engine.append_best`."""
        return self.engine.best_of_tree([last, *self.draft.ids], self.draft.parents)

    def sampled(self, last: int, sampler: Sampler) -> list[int] | None:
        """The tokens that a sampler samples after each row, as `Engine.append_sampled`."""
        return self.engine.sampled_of_tree([last, *self.draft.ids], self.draft.parents, sampler)

    def keep(self, last: int, path: Sequence[int]) -> None:
        """Continue the text with `last` and the tokens of a path."""
        rows, ids = [0, *(1 + node for node in path)], [last, *(self.draft.ids[node] for node in path)]
        self.engine.keep_path(ids, self.draft.parents, rows)
