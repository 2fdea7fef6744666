"""Searches for the scale, or scale and minimum, with the least error of blocks on a grid of levels.

All arrays here are (elements of a block, blocks): sums over a block then run over whole vectors, and a
block's scale broadcasts along the contiguous axis. `weights` are the weights of the squared errors.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# A single quant of 32 that differs by one of 31 steps gives about 3e-5, rounding at most 1e-6.
MIN_SPREAD = np.float32(4e-6)


class Grid(Protocol):
    """The allowed levels of a quant."""

    def nearest(self, values: Floats, inverse: Floats, out: Floats) -> Floats:
        """The levels nearest to values·inverse, written to `out`."""
        ...


class IntegerGrid:
    """All integers from `lowest` to `highest`."""

    def __init__(self, lowest: int, highest: int) -> None:
        self.lowest = np.float32(lowest)
        self.highest = np.float32(highest)
        self.farthest = lowest if -lowest > highest else highest

    def nearest(self, values: Floats, inverse: Floats, out: Floats) -> Floats:
        np.multiply(values, inverse, out=out)
        np.rint(out, out=out)
        # One pass of clip takes a seventh of the time of maximum and minimum with scalars.
        return np.clip(out, self.lowest, self.highest, out=out)


class ScaleAndMinimum(NamedTuple):
    """values ≈ scale·quants - minimum, with quants from 0 up and minimum at least 0; each (blocks,)."""

    scale: Floats
    minimum: Floats


def inner(left: Floats, right: Floats) -> Floats:
    """Inner products per block, (elements, blocks) twice -> (blocks,)."""
    sums: Floats = np.einsum("eb,eb->b", left, right)
    return sums


def reciprocal(values: Floats) -> Floats:
    """1 / values, and 0 where that is not finite."""
    inverse = np.float32(1) / values
    inverse[~np.isfinite(inverse)] = 0
    return inverse


def largest_magnitudes(columns: Floats) -> Floats:
    """The value of largest magnitude, the first of several, of each column: (elements, n) -> (n,)."""
    lowest, highest = columns.min(axis=0), columns.max(axis=0)
    largest: Floats = np.where(-lowest > highest, lowest, highest)
    # Minimum and maximum take a sixteenth of the time of argmax, but don't give the first index.
    even = np.flatnonzero(-lowest == highest)
    if even.size:
        tied = columns[:, even]
        largest[even] = np.take_along_axis(tied, np.abs(tied).argmax(axis=0)[None], axis=0)[0]
    return largest


def search_scale(values: Floats, weights: Floats, grid: Grid, targets: Sequence[float]) -> Floats:
    """The scale per block that minimizes Σ weight·(value - scale·level)².

    For each of `targets`, tries the scale that maps the value of largest magnitude to it, and computes its
    least-squares scale. Then refines the best one once more.
    """
    largest = largest_magnitudes(values)
    levels, weighted = np.empty_like(values), np.empty_like(values)
    best_scale, best_gain = np.zeros_like(largest), np.zeros_like(largest)

    def try_scale(inverse: Floats) -> None:
        grid.nearest(values, inverse, out=levels)
        np.multiply(levels, weights, out=weighted)
        along = inner(weighted, values)
        scale = along * reciprocal(inner(weighted, levels))
        # The error is Σ weight·value² minus this gain.
        gain = scale * along
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)

    inverse_largest = reciprocal(largest)
    for target in targets:
        try_scale(inverse_largest * np.float32(target))
    try_scale(reciprocal(best_scale))
    return best_scale


def _least_squares(
    total: Floats, square: Floats, along: Floats, weight_sum: Floats, value_sum: Floats
) -> tuple[Floats, Floats]:
    """Scale and offset per block that minimize Σ weight·(value - scale·quant - offset)², offset at most 0,
    from the weighted sums of quants, quants², quants·values, 1 and values.
    """
    product = weight_sum * square
    spread = product - total * total
    # All quants are equal except for rounding: scale and minimum can't be separated.
    spread[spread < product * MIN_SPREAD] = 0
    determinant = reciprocal(spread)
    offset = (square * value_sum - total * along) * determinant
    offset[(offset > 0) | (determinant == 0)] = 0
    return (along - offset * total) * reciprocal(square), offset


def search_scale_and_minimum(
    values: Floats, weights: Floats, highest: int, steps: Sequence[float]
) -> ScaleAndMinimum:
    """Scale and minimum per block that minimize Σ weight·(value - scale·quant + minimum)².

    For each of `steps`, tries highest + step levels between the lowest value (or 0) and the highest one, and
    solves the two least-squares equations, with the minimum at or above 0. Then refines the best pair twice
    more.
    """
    lowest = np.minimum(values.min(axis=0), np.float32(0))
    inverse_span = reciprocal(values.max(axis=0) - lowest)
    weight_sum, value_sum = weights.sum(axis=0), inner(weights, values)
    grid, quants, weighted = IntegerGrid(0, highest), np.empty_like(values), np.empty_like(values)
    above = values - lowest
    best_scale, best_offset = np.zeros_like(lowest), lowest.copy()
    best_gain = best_offset * (2 * value_sum - best_offset * weight_sum)

    def solve() -> None:
        np.multiply(quants, weights, out=weighted)
        total, square, along = weighted.sum(axis=0), inner(weighted, quants), inner(weighted, values)
        scale, offset = _least_squares(total, square, along, weight_sum, value_sum)
        gain = scale * (2 * along - scale * square - 2 * offset * total)
        gain += offset * (2 * value_sum - offset * weight_sum)
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_offset, offset, where=better)

    for step in steps:
        # No value is below the lowest one; with fewer levels than available, none is above the highest.
        np.multiply(above, inverse_span * np.float32(highest + step), out=quants)
        np.rint(quants, out=quants)
        if step >= 0.5:
            np.clip(quants, grid.lowest, grid.highest, out=quants)
        solve()
    for _ in range(2):
        np.subtract(values, best_offset, out=quants)
        grid.nearest(quants, reciprocal(best_scale), out=quants)
        solve()
    return ScaleAndMinimum(best_scale, -best_offset)
