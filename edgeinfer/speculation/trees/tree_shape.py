"""Plans the shape of draft trees from the measured cost of forwards and how often candidates are right.

With the probability r_i that the i-th candidate after a token is the next one, a node's probability is the
product of those on its path. The tree of n nodes and d levels with the most expected tokens has the n nodes
of these d levels with the largest probabilities; n and d are those with the most tokens per second.
Source: Chen et al. 2024, "Sequoia" (arXiv:2402.12374), section 3.1: the positional acceptance assumption.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from edgeinfer.speculation.draft_costs import MAX_DRAFTED, MAX_ROWS, DraftCosts

MEMORY = 0.95
"""Weight of the earlier observations of a candidate after one more."""
FIRST_SHARE = 0.3
"""Assumed probability of each further candidate, given that those before it are wrong."""
SHARPENING, MAX_SHARPNESS = 0.1, 4.0
"""The change of the sharpness with each observation, and its limit."""
PLANNED_STEPS = 16
"""Drafts with the same shape, before it is planned again."""


class TreeShape(NamedTuple):
    """The maximum levels of a tree, and the maximum number of its nodes; as many as levels: a chain."""

    depth: int
    nodes: int


class TreePlanner:
    """The shapes of the trees of one model and its drafter for one kind of completion."""

    def __init__(self) -> None:
        self.sharpness = 1.0
        """As in a `DraftRequest`."""
        self._right = list[float]()
        self._offered = list[float]()
        self._shape: TreeShape | None = None
        self._limits, self._steps = (0, 0), 0

    def record(self, offered: int, hit: int | None, probs: Sequence[float] = ()) -> None:
        """Record that `offered` candidates followed a token, which of them was right, and their `probs`."""
        if probs:
            surprise = (hit == 0) - probs[0]
            sharpness = self.sharpness * math.exp(SHARPENING * surprise)
            self.sharpness = min(MAX_SHARPNESS, max(1 / MAX_SHARPNESS, sharpness))
        while len(self._right) < offered:
            self._right.append(0.0)
            self._offered.append(0.0)
        for rank in range(offered):
            self._right[rank] = MEMORY * self._right[rank] + (rank == hit)
            self._offered[rank] = MEMORY * self._offered[rank] + 1

    def rates(self, acceptance: float, width: int) -> list[float]:
        """The probabilities that each of `width` candidates is right; `acceptance`: that of the first."""
        rates = [acceptance]
        for rank in range(1, width):
            assumed = FIRST_SHARE * max(0.0, 1 - sum(rates))
            seen = self._offered[rank] if rank < len(self._offered) else 0.0
            right = self._right[rank] if rank < len(self._right) else 0.0
            rates.append((right + 2 * assumed) / (seen + 2))
        return rates

    def shape(
        self, costs: DraftCosts, acceptance: float, limit: int, width: int, shares: Sequence[float]
    ) -> TreeShape:
        """The shape with the most expected tokens per second, of at most `limit` levels; `shares`: the
        acceptance of each, relative to `acceptance`.
        """
        limits, self._steps = (min(limit, MAX_DRAFTED), width), self._steps + 1
        if self._shape is None or limits != self._limits or self._steps >= PLANNED_STEPS:
            self._shape = best_shape(costs, self.rates(acceptance, width), shares[: limits[0]])
            self._limits, self._steps = limits, 0
        return self._shape


def best_shape(costs: DraftCosts, rates: Sequence[float], shares: Sequence[float]) -> TreeShape:
    """As `TreePlanner.shape`, with the probabilities of the candidates, of at most as many levels as there
    are `shares`.
    """
    best, most = TreeShape(1, 1), 0.0
    for depth in range(1, len(shares) + 1):
        tokens = 1.0
        for nodes, prob in enumerate(node_probs(rates, shares[:depth], MAX_ROWS - 1), 1):
            tokens += prob
            speed = tokens / max(1e-12, costs.forward(1 + nodes) + costs.draft(depth))
            if nodes >= depth and speed > most:
                best, most = TreeShape(depth, nodes), speed
    return best


def node_probs(rates: Sequence[float], shares: Sequence[float], count: int) -> list[float]:
    """The probabilities of the `count` most probable nodes of a tree, falling. Those of a level's candidates
    are the `rates` times its share, of at most 1 in all.
    """
    most = 1 / max(1e-12, sum(rates))
    levels = [[rate * min(share, most) for rate in rates] for share in shares]
    heap = [(-rate, 1) for rate in levels[0]]
    heapify(heap)
    found = list[float]()
    while heap and len(found) < count:
        negative, level = heappop(heap)
        found.append(-negative)
        if level < len(levels):
            for rate in levels[level]:
                heappush(heap, (negative * rate, level + 1))
    return found
