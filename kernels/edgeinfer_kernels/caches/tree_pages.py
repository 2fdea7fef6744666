"""Where the tokens of a tree are in a paged cache: each path of the tree reads its tokens as one sequence.

The first path is stored after the text. Each other one branches off a path before it: from the page of its
first token on it has separate pages. A token on several paths is written to all of their pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer_kernels.backend import PAGE, BatchPositions

Pages = dict[int, int]
"""Page of a sequence -> page of the cache, for those that aren't the same."""


@dataclass(frozen=True)
class Branch:
    """A path after the first. `head`: its first row; `base`: the page of the sequence in which it begins."""

    head: int
    base: int
    pages: Pages


def tree_positions(start: int, parents: Sequence[int]) -> list[int]:
    """The positions of a step's rows: the token at `start`, then a token for each of `parents`, the index of
    the one before it (-1: the first row).
    """
    positions = [start]
    for parent in parents:
        positions.append(positions[parent + 1] + 1)
    return positions


class TreePages:
    """The places of a tree's rows, as in `tree_positions`. `first_page`: the first free page of the cache."""

    def __init__(self, parents: Sequence[int], start: int) -> None:
        self._before = [-1, *(parent + 1 for parent in parents)]
        """The row before each row."""
        self.positions = tree_positions(start, parents)
        self.start = start
        self.first_page = self.end_page = -(-(max(self.positions) + 1) // PAGE)
        self.branches = list[Branch]()
        self._branch_of: list[int | None] = [None]
        """The branch of each row; None: the first path."""
        followed = set[int]()
        for row, before in enumerate(self._before[1:], 1):
            self._branch_of.append(self._new(row) if before in followed else self._branch_of[before])
            followed.add(before)
        self._complete()

    def _new(self, row: int) -> int:
        """Begin a branch at a row."""
        self.branches.append(Branch(row, self.positions[row] // PAGE, {}))
        return len(self.branches) - 1

    def _complete(self) -> None:
        """Set the pages of all branches: those of the path before them, then separate ones."""
        last = [branch.base for branch in self.branches]
        for own, position in zip(self._branch_of, self.positions, strict=True):
            if own is not None:
                last[own] = max(last[own], position // PAGE)
        for index, branch in enumerate(self.branches):
            earlier = self._branch_of[self._before[branch.head]]
            shared = {} if earlier is None else self.branches[earlier].pages
            branch.pages.update({page: at for page, at in shared.items() if page < branch.base})
            for page in range(branch.base, last[index] + 1):
                branch.pages[page] = self.end_page
                self.end_page += 1

    def copied_text(self) -> list[tuple[int, int, int]]:
        """(source, target, count): the positions of the text that are copied to pages of branches."""
        begun = [(branch.base * PAGE, branch.pages[branch.base] * PAGE) for branch in self.branches]
        return [(source, target, self.start - source) for source, target in begun if source < self.start]

    def slot(self, row: int) -> int:
        """The cache slot of a row, from which its path continues."""
        branch, position = self._branch_of[row], self.positions[row]
        return position if branch is None else _slot(self.branches[branch].pages, position)

    def moves(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """(source, target, count): copies of positions, after which the rows of a path follow the text."""
        moved = [(self.slot(row), self.start + index) for index, row in enumerate(rows)]
        return _runs([pair for pair in moved if pair[0] != pair[1]])

    def batch(self) -> BatchPositions:
        """The rows as a batch."""
        pages = np.tile(np.arange(max(self.positions) // PAGE + 1), (len(self.positions), 1))
        for row, branch in enumerate(self._branch_of):
            for page, at in () if branch is None else self.branches[branch].pages.items():
                if page < pages.shape[1]:
                    pages[row, page] = at
        return BatchPositions(np.array(self.positions), pages, tuple(self._copies()))

    def _copies(self) -> list[tuple[int, ...]]:
        """Further slots of each row: in the pages of branches that begin after it."""
        copies = [list[int]() for _ in self.positions]
        for branch in self.branches:
            row = self._before[branch.head]
            while row >= 0 and self.positions[row] // PAGE == branch.base:
                copies[row].append(_slot(branch.pages, self.positions[row]))
                row = self._before[row]
        return [tuple(each) for each in copies]


def _slot(pages: Pages, position: int) -> int:
    return pages.get(position // PAGE, position // PAGE) * PAGE + position % PAGE


def _runs(moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, count) of moves of one position each; consecutive ones together."""
    runs = list[tuple[int, int, int]]()
    for source, target in moves:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
