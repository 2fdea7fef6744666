"""Searches for the rows of a grid and the scales with the least weighted error, for the IQ1 to IQ3 types.

The cost of a row is Σ weight·(value - scale·level)², less Σ weight·value². It is linear in the row's levels
and their squares, so a matrix product gives the costs of all rows of the grid, and the search is exact.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.scale_search import inner, reciprocal, search_scale
from edgeinfer_quant_formats.codecs.super_blocks import as_columns, to_f16, to_nonzero_f16
from edgeinfer_quant_formats.formats import FORMATS
from edgeinfer_quant_formats.grids import GRIDS

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

# Where the largest value of a sub-block is tried, relative to the largest level.
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
# Offsets of the target for the largest scale of a block from the largest one that can be stored.
SCALE_STEPS = (-6.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
# Factors of the scale that is the best without a grid, which are tried with it. For IQ1, whose grid has 2,048
# rows, more than one reduces the error by only 0.5 % and takes 1.5 times as long.
STARTS, STARTS_OF_IQ1 = (0.8, 0.9, 1.0, 1.1), (1.0,)
# The step with the least error makes weights smaller on average, which costs more divergence than error: of
# the factor with which Σ weight·value·(value - result) is 0, this part is applied. The divergence of the
# built-in model from its F16 was least with 1 (of 0, 0.5 and 1) below 3 bits, where 1 adds 12 % to the error.
UNBIASED_PART = np.float32(0.8)
MAX_FACTOR = np.float32(1.3)
# A better scale without a grid gains this factor: less is rounding.
MIN_GAIN = np.float32(1.00001)
# Multiplications of a product: as many as OpenBLAS does on one thread, and the costs fit the cache.
MULTIPLICATIONS = 1 << 18


class OddGrid:
    """The odd integers from 1 to `highest`: the scales of sub-blocks in steps of their block."""

    def __init__(self, highest: int) -> None:
        self.highest = np.float32(highest)

    def nearest(self, values: Floats, inverse: Floats, out: Floats) -> Floats:
        """The odd integers nearest to values·inverse, written to `out`."""
        np.multiply(values, inverse, out=out)
        np.clip(out, np.float32(1), self.highest, out=out)
        out -= np.float32(1)
        out *= np.float32(0.5)
        np.rint(out, out=out)
        out *= np.float32(2)
        out += np.float32(1)
        return out


@dataclass(frozen=True)
class RowTable:
    """The rows of the grid of a type, as multiples of a scale; of IQ1 once for each shift.

    levels: (tables, rows, columns). products: (tables, 2·columns, rows), squares of the levels, then levels.
    """

    levels: Floats
    products: Floats

    @property
    def columns(self) -> int:
        return int(self.levels.shape[2])

    @property
    def distinct(self) -> Floats:
        """All levels, ascending."""
        distinct: Floats = np.unique(self.levels)
        return distinct


@cache
def row_table(name: str) -> RowTable:
    """The table of a type."""
    spec = FORMATS[name]
    rows = GRIDS[spec.grid].rows.astype(np.float32)
    shifted = [8 * rows + 1, 8 * rows - 1] if spec.grid == "IQ1" else [rows]
    levels = np.stack(shifted) * np.float32(spec.unit)
    products = np.concatenate((levels * levels, levels), axis=2).transpose(0, 2, 1)
    return RowTable(levels, np.ascontiguousarray(products))


class Rows(NamedTuple):
    """The nearest rows, (g,), their tables, (g,), their levels, (g, columns), and costs, (g,)."""

    indices: Indices
    tables: Indices
    levels: Floats
    costs: Floats


class GridFit(NamedTuple):
    """values ≈ d·scale·level: d (n,), odd scales (n, sub-blocks), rows and their tables, each
    (n, 256 / columns).
    """

    d: Floats
    scales: Floats
    rows: Indices
    tables: Indices


def nearest_rows(table: RowTable, values: Floats, weights: Floats, scales: Floats, shared: int) -> Rows:
    """The rows with the least cost for values and weights (g, columns) and a scale for each, (g,).

    Each `shared` consecutive rows are of the same table.
    """
    count, columns = values.shape
    step = max(MULTIPLICATIONS // table.products[0].size // 8 * 8, 8)
    # All products have the same shape: rounding does not depend on the number of rows.
    factors = np.zeros((-(-count // step) * step, 2 * columns), np.float32)
    np.multiply(weights, (scales * scales)[:, None], out=factors[:count, :columns])
    np.multiply(weights * values, np.float32(-2) * scales[:, None], out=factors[:count, columns:])
    indices = np.empty((len(table.levels), len(factors)), np.int64)
    product = np.empty((step, table.levels.shape[1]), np.float32)
    for best, matrix in zip(indices, table.products, strict=True):
        for start in range(0, count, step):
            np.matmul(factors[start : start + step], matrix, out=product)
            product.argmin(axis=1, out=best[start : start + step])
    indices, factors = indices[:, :count], factors[:count]
    levels = np.stack([rows[best] for rows, best in zip(table.levels, indices, strict=True)])
    costs = np.einsum("tgc,gc->tg", levels * levels, factors[:, :columns])
    costs += np.einsum("tgc,gc->tg", levels, factors[:, columns:])
    tables = np.repeat(costs.reshape(len(costs), -1, shared).sum(axis=2).argmin(axis=0), shared)
    each = np.arange(count)
    return Rows(indices[tables, each], tables, levels[tables, each], costs[tables, each])


class GridSearch:
    """Blocks (n, 256) of values and of the weights of their squared errors, for the type `name`."""

    def __init__(self, name: str, values: Floats, weights: Floats) -> None:
        spec = FORMATS[name]
        self.table, self.size = row_table(name), spec.sub_block
        self.shape = (len(values), 256 // self.size)
        self.is_iq1 = spec.grid == "IQ1"
        # One shift for 32 weights in IQ1_S, for 8 in IQ1_M.
        self._shared = 4 if name == "IQ1_S" else 1
        self._values = values.reshape(-1, self.table.columns)
        self._weights = weights.reshape(-1, self.table.columns)
        self._value_columns, self._weight_columns = (
            as_columns(values, self.size),
            as_columns(weights, self.size),
        )
        self._scale_grid = OddGrid(15 if self.is_iq1 else 31)

    def fit(self) -> GridFit:
        """The rows and scales: scales are searched, rounded to odd multiples of a step, and searched again
        near those; the step is the best for what was found each time.
        """
        fitted, squares = (np.ascontiguousarray(array.reshape(self.shape).T) for array in self._start())
        targets = [float(self._scale_grid.highest) + step for step in SCALE_STEPS]
        d = np.abs(to_nonzero_f16(search_scale(fitted, squares, self._scale_grid, targets)))
        scales, rows = self._nearest(d, self._rounded(fitted.T, d), (0,))
        d, fitted = self._refitted(d, scales, rows)
        scales, rows = self._nearest(d, self._rounded(fitted, d), (0, -2, 2))
        d, _ = self._refitted(d, scales, rows)
        d = to_f16(d * self._unbiased(d, scales, rows))
        return GridFit(d, scales, rows.indices.reshape(len(d), -1), rows.tables.reshape(len(d), -1))

    def _refitted(self, d: Floats, scales: Floats, rows: Rows) -> tuple[Floats, Floats]:
        """The best step for these rows and scales, and the scales without rounding, (n, sub-blocks)."""
        along, square = (sums.reshape(self.shape) for sums in self._sums(rows.levels))
        fitted = (scales * along).sum(axis=1) * reciprocal((scales * scales * square).sum(axis=1))
        rounded = to_f16(np.maximum(fitted, np.float32(0)))
        return np.where(rounded > 0, rounded, d), along * reciprocal(square)

    def _unbiased(self, d: Floats, scales: Floats, rows: Rows) -> Floats:
        """The factor of the step with which weights are not smaller on average, (n,)."""
        along, _ = self._sums(rows.levels)
        result = d * (scales * along.reshape(self.shape)).sum(axis=1)
        squares = inner(self._weight_columns, self._value_columns * self._value_columns)
        factor: Floats = squares.reshape(self.shape).sum(axis=1) * reciprocal(result)
        np.clip(factor, np.float32(1), MAX_FACTOR, out=factor)
        return np.float32(1) + UNBIASED_PART * (factor - np.float32(1))

    def _rounded(self, fitted: Floats, d: Floats) -> Floats:
        out = np.empty(self.shape, np.float32)
        return self._scale_grid.nearest(fitted.reshape(self.shape), reciprocal(d)[:, None], out=out)

    def _rows(self, scales: Floats) -> Rows:
        """The nearest rows for a scale for each sub-block."""
        each = np.repeat(scales.reshape(-1), self.size // self.table.columns)
        return nearest_rows(self.table, self._values, self._weights, each, self._shared)

    def _sums(self, levels: Floats) -> tuple[Floats, Floats]:
        """Σ weight·level·value and Σ weight·level² of each sub-block, (sub-blocks,)."""
        columns = as_columns(levels, self.size)
        weighted = columns * self._weight_columns
        return inner(weighted, self._value_columns), inner(weighted, columns)

    def _start(self) -> tuple[Floats, Floats]:
        """The best scale of each sub-block, (sub-blocks,), and Σ weight·level² of its levels."""
        first = self._without_grid()
        best, best_gain, squares = (np.zeros_like(first) for _ in range(3))
        for factor in STARTS_OF_IQ1 if self.is_iq1 else STARTS:
            along, square = self._sums(self._rows(first * np.float32(factor)).levels)
            scale = np.maximum(along, np.float32(0)) * reciprocal(square)
            better = scale * along > best_gain
            for kept, new in ((best_gain, scale * along), (best, scale), (squares, square)):
                np.copyto(kept, new, where=better)
        return best, squares

    def _without_grid(self) -> Floats:
        """The best scale of each sub-block if every combination of levels were a row, (sub-blocks,)."""
        levels, values, weights = self.table.distinct, self._value_columns, self._weight_columns
        midpoints = (levels[1:] + levels[:-1]) / np.float32(2)
        inverse: Floats = reciprocal(np.abs(values).max(axis=0)) * levels[-1]
        best, best_gain = np.zeros_like(inverse), np.zeros_like(inverse)
        # First at the lowest level: equal values have it in a row of the grid, not always the others.
        lowest = float(np.abs(levels).min() / levels[-1])
        for target in (lowest, *TARGETS):
            nearest = levels[np.searchsorted(midpoints, values * (inverse * np.float32(target)))]
            weighted = nearest * weights
            along = inner(weighted, values)
            scale = along * reciprocal(inner(weighted, nearest))
            better = scale * along > best_gain * MIN_GAIN
            np.copyto(best_gain, scale * along, where=better)
            np.copyto(best, scale, where=better)
        np.maximum(best, np.float32(0), out=best)
        return best

    def _nearest(self, d: Floats, scales: Floats, near: tuple[int, ...]) -> tuple[Floats, Rows]:
        """Of the scales plus each of `near` the best of each sub-block, (n, sub-blocks), with its rows."""
        per_scale = self.size // self.table.columns
        tried = [np.clip(scales + np.float32(step), np.float32(1), self._scale_grid.highest) for step in near]
        found = [self._rows(each * d[:, None]) for each in tried]
        costs = [rows.costs.reshape(*self.shape, per_scale).sum(axis=2) for rows in found]
        best = np.argmin(costs, axis=0)
        of_rows = np.repeat(best.reshape(-1), per_scale)
        each = np.arange(len(of_rows))
        rows = Rows(*(np.stack(parts)[of_rows, each] for parts in zip(*found, strict=True)))
        taken: Floats = np.take_along_axis(np.stack(tried), best[None], axis=0)[0]
        return taken, rows
