"""The multiple-choice knapsack: one option of each group, with the least total loss within a budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_STATES = 1 << 16
"""Totals that are kept after each group. With fewer undominated totals the solution is exact."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one group: the cost and the loss of each, (options,)."""

    costs: Floats
    losses: Floats


@dataclass(frozen=True, slots=True)
class _Totals:
    """Undominated totals by rising cost and falling loss, and how each was reached."""

    costs: Floats
    losses: Floats
    parents: NDArray[np.int64]
    picked: NDArray[np.int64]


def select_options(
    groups: Sequence[Options], budget: float, max_states: int = MAX_STATES
) -> list[int] | None:
    """The option of each group for which Σ loss is least with Σ cost <= budget; None: no selection fits.

    Dynamic programming over the undominated totals of the first groups. Of more than `max_states`, the best
    one in each of as many equal intervals of cost is kept: costs stay exact, so the budget is never exceeded.
    """
    least = np.array([group.costs.min() for group in groups] + [0.0])
    remaining = np.cumsum(least[::-1])[::-1]
    start = np.zeros(1)
    steps = [_Totals(start, start, np.zeros(1, np.int64), np.zeros(1, np.int64))]
    for index, group in enumerate(groups):
        found = _extended(steps[-1], group, budget - remaining[index + 1], max_states)
        if not len(found.costs):
            return None
        steps.append(found)
    selected, state = [], len(steps[-1].costs) - 1
    for step in reversed(steps[1:]):
        selected.append(int(step.picked[state]))
        state = int(step.parents[state])
    return selected[::-1]


def _extended(before: _Totals, group: Options, budget: float, max_states: int) -> _Totals:
    """The totals with one more group, of at most `budget`."""
    costs = (before.costs[:, None] + group.costs).reshape(-1)
    losses = (before.losses[:, None] + group.losses).reshape(-1)
    fitting = np.flatnonzero(costs <= budget)
    order = fitting[np.lexsort((losses[fitting], costs[fitting]))]
    if len(order):
        lowest = np.minimum.accumulate(losses[order])
        order = order[np.concatenate(([True], losses[order][1:] < lowest[:-1]))]
    if len(order) > max_states:
        order = _thinned(order, costs[order], max_states)
    count = len(group.costs)
    return _Totals(costs[order], losses[order], order // count, order % count)


def _thinned(order: NDArray[np.int64], costs: Floats, max_states: int) -> NDArray[np.int64]:
    """The last total, which has the least loss, of each of `max_states` intervals of cost."""
    width = (costs[-1] - costs[0]) / max_states
    interval = np.floor((costs - costs[0]) / width)
    kept: NDArray[np.int64] = order[np.append(interval[1:] != interval[:-1], True)]
    return kept
