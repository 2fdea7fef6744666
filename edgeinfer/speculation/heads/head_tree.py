"""Evaluates the tokens of a tree with a draft head, level by level, each path in pages of its cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer.speculation.trees.tree_growth import ROOT
from edgeinfer_kernels.backend import PAGE, Backend, BatchPositions

Floats = npt.NDArray[np.float32]


class Evaluated(NamedTuple):
    """A token that the head has evaluated: its row after the layer, and the pages of its path that aren't
    those of the text; `is_first`: the path is stored after the text.
    """

    row: Floats
    pages: dict[int, int]
    is_first: bool


class HeadTree:
    """The tree after a text of `position` pairs, the last of which gave `row`, (1, hidden size).

    `positions`: of the head's cache. The first path is stored after the text; another one has a copy of the
    page in which it leaves a path before it, and separate pages after that.
    """

    def __init__(
        self, backend: Backend[Any], row: Floats, position: int, levels: int, positions: int
    ) -> None:
        self._backend, self._position = backend, position
        self._evaluated = {ROOT: Evaluated(row, {}, True)}
        self._followed = set[int]()
        self._free = -(-(position + levels) // PAGE)
        self._end = positions // PAGE

    def evaluate(self, nodes: Sequence[tuple[int, int, int]], level: int) -> list[tuple[int, Floats]]:
        """The logits after each of the nodes of a level, (node, parent, token), as far as there are pages."""
        position = self._position + level - 1
        placed = [each for each in nodes if self._place(*each[:2], position)]
        if not placed:
            return []
        rows = np.concatenate([self._evaluated[parent].row for _, parent, _ in placed])
        self._backend.set_own_hidden(rows, position)
        x = self._backend.embed([token for _, _, token in placed])
        self._backend.forward_batch(x, self._batch([node for node, _, _ in placed], position))
        for index, (node, _, _) in enumerate(placed):
            self._evaluated[node] = self._evaluated[node]._replace(row=x[index : index + 1].copy())
        logits = self._backend.logits(x)
        return [(node, logits[index]) for index, (node, _, _) in enumerate(placed)]

    def _place(self, node: int, parent: int, position: int) -> bool:
        """Give a node its pages; False: there is no free one."""
        before, page = self._evaluated[parent], position // PAGE
        is_next = parent not in self._followed and (before.is_first or page in before.pages)
        pages = before.pages
        if not is_next:
            if self._free >= self._end:
                return False
            source, count = before.pages.get(page, page), position % PAGE
            if count:
                self._backend.copy_positions(source * PAGE, self._free * PAGE, count)
            pages = {**before.pages, page: self._free}
            self._free += 1
        self._followed.add(parent)
        self._evaluated[node] = Evaluated(before.row, pages, is_next and before.is_first)
        return True

    def _batch(self, nodes: Sequence[int], position: int) -> BatchPositions:
        pages = np.tile(np.arange(position // PAGE + 1), (len(nodes), 1))
        for row, node in enumerate(nodes):
            for page, at in self._evaluated[node].pages.items():
                pages[row, page] = at
        return BatchPositions(np.full(len(nodes), position), pages)
