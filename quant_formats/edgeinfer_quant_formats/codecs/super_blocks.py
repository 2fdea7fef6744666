"""Fits super-blocks of 256 weights: searches the scales of sub-blocks, quantizes them, then refits all
together.

Formats differ in the grids of their quants and their scales; the fit is the same for all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs.bit_fields import f16_bytes, read_f16
from edgeinfer_quant_formats.codecs.scale_search import (
    Floats,
    Grid,
    IntegerGrid,
    inner,
    reciprocal,
    search_scale,
    search_scale_and_minimum,
)

# Offsets of the target for the largest scale of a super-block from the farthest level of the scale grid.
SCALE_STEPS = (-1.0, -0.5, 0.0, 0.5, 1.0)
ROUNDS = 2
SMALLEST_F16 = np.float32(2.0**-24)
SMALLEST_NORMAL_F16 = np.float32(2.0**-14)


class SuperBlocks(NamedTuple):
    """weights ≈ d·scale·level - dmin·minimum.

    d, dmin (n,); scales, minima (n, sub-blocks); levels (n, 256).
    """

    d: Floats
    scales: Floats
    levels: Floats
    dmin: Floats
    minima: Floats


class SubBlocks:
    """Blocks (n, 256) and their error weights, with one column per sub-block of `size`."""

    def __init__(self, blocks: Floats, weights: Floats, size: int) -> None:
        self.values = as_columns(blocks, size)
        self.weights = as_columns(weights, size)
        self.shape = (len(blocks), 256 // size)
        self.weight_sum = self.weights.sum(axis=0).reshape(self.shape)
        self.value_sum = inner(self.weights, self.values).reshape(self.shape)
        self.levels = np.empty_like(self.values)
        self._weighted = np.empty_like(self.values)

    def sums(self) -> tuple[Floats, Floats, Floats]:
        """Σ weight·level, Σ weight·level², Σ weight·level·value of each sub-block, (n, sub-blocks)."""
        weighted = np.multiply(self.levels, self.weights, out=self._weighted)
        total, square = weighted.sum(axis=0), inner(weighted, self.levels)
        along = inner(weighted, self.values)
        return total.reshape(self.shape), square.reshape(self.shape), along.reshape(self.shape)

    def common_step(self, fitted: Floats, grid: IntegerGrid) -> Floats:
        """The step per super-block of which all its fitted scales are approximate multiples, (n,)."""
        columns = np.ascontiguousarray(fitted.reshape(self.shape).T)
        weights = np.ascontiguousarray(self.weight_sum.T)
        targets = [grid.farthest + step for step in SCALE_STEPS]
        return to_nonzero_f16(search_scale(columns, weights, grid, targets))

    def in_steps(self, fitted: Floats, step: Floats, grid: IntegerGrid) -> Floats:
        """Fitted scales as multiples of their super-block's step, (n, sub-blocks)."""
        out = np.empty(self.shape, np.float32)
        return grid.nearest(fitted.reshape(self.shape), reciprocal(step)[:, None], out=out)

    def rows(self) -> Floats:
        """The levels in the order of the blocks, (n, 256)."""
        return self.levels.T.reshape(len(self.weight_sum), 256)


def as_columns(blocks: Floats, size: int) -> Floats:
    """(n, elements) blocks as (size, n·elements/size): each sub-block is a column, as input of the
    searches.
    """
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def to_f16(values: Floats) -> Floats:
    """Rounded to float16, as stored in the file, (n,)."""
    return read_f16(f16_bytes(values[:, None]))[:, 0]


def to_nonzero_f16(steps: Floats) -> Floats:
    """Rounded to float16; subnormal values are rounded away from zero.

    A step that is too large costs some precision of sub-block scales; a step of zero loses the whole block.
    """
    rounded = to_f16(steps)
    short = (np.abs(rounded) < np.abs(steps)) & (np.abs(steps) < SMALLEST_NORMAL_F16)
    return rounded + np.where(short, np.copysign(SMALLEST_F16, steps), np.float32(0))


def _refitted(fitted: Floats, usable: NDArray[np.bool_], step: Floats) -> Floats:
    """The new steps, as float16; the old ones where the new ones are unusable or zero."""
    rounded = to_f16(np.where(usable, fitted, step))
    return np.where(rounded != 0, rounded, step)


def error_weights(blocks: Floats, importance: Floats | None, coarse: bool = False) -> Floats:
    """The weight of each squared error, in the shape of `blocks`; `coarse`: for coarse levels.

    Large weights count slightly more: 2·root mean square + |value|, or with an importance importance·√(2·mean
    square + value²). The 2 was the best of 1 to 3 by the divergence of the built-in model and its draft from
    their F16, the mean of six mixes. With coarse levels large weights should count more: importance·(root
    mean square + |value|) reduced the divergence of Q2_K by 2 to 4 % on texts of both models, but not that of
    Q3_K.
    """
    square = blocks * blocks
    mean = square.mean(axis=1, keepdims=True)
    if importance is None:
        weights: Floats = 2 * np.sqrt(mean) + np.abs(blocks)
    elif coarse:
        weights = importance * (np.sqrt(mean) + np.abs(blocks))
    else:
        weights = importance * np.sqrt(2 * mean + square)
    return weights


def fit_scales(
    blocks: Floats, weights: Floats, size: int, grid: Grid, scale_grid: IntegerGrid, targets: Sequence[float]
) -> SuperBlocks:
    """Fit blocks (n, 256) with a quantized scale for every `size` weights and no minimum."""
    sub = SubBlocks(blocks, weights, size)
    scale = search_scale(sub.values, sub.weights, grid, targets)
    d = sub.common_step(scale, scale_grid)
    for _ in range(ROUNDS):
        scales = sub.in_steps(scale, d, scale_grid)
        grid.nearest(sub.values, reciprocal(d[:, None] * scales).reshape(-1), out=sub.levels)
        _, square, along = sub.sums()
        scale = along * reciprocal(square)
        refitted = (scales * along).sum(axis=1) * reciprocal((scales * scales * square).sum(axis=1))
        d = _refitted(refitted, refitted != 0, d)
    grid.nearest(sub.values, reciprocal(d[:, None] * scales).reshape(-1), out=sub.levels)
    none = np.zeros_like(d)
    return SuperBlocks(d, scales, sub.rows(), none, np.zeros_like(scales))


def fit_scales_and_minima(
    blocks: Floats, weights: Floats, size: int, highest: int, scale_grid: IntegerGrid, steps: Sequence[float]
) -> SuperBlocks:
    """Fit blocks (n, 256) with a quantized scale and a quantized minimum for every `size` weights."""
    sub, grid = SubBlocks(blocks, weights, size), IntegerGrid(0, highest)
    scale, minimum = search_scale_and_minimum(sub.values, sub.weights, highest, steps)
    d, dmin = sub.common_step(scale, scale_grid), sub.common_step(minimum, scale_grid)

    def round_weights(scale: Floats, offset: Floats) -> None:
        np.add(sub.values, offset.reshape(-1), out=sub.levels)
        grid.nearest(sub.levels, reciprocal(scale).reshape(-1), out=sub.levels)

    for _ in range(ROUNDS):
        minima = sub.in_steps(minimum, dmin, scale_grid)
        offset = minima * dmin[:, None]
        round_weights(scale, offset)
        total, square, along = sub.sums()
        scales = sub.in_steps((along + offset * total) * reciprocal(square), d, scale_grid)
        round_weights(scales * d[:, None], offset)
        d, dmin = _refit_steps(sub, SuperBlocks(d, scales, sub.levels, dmin, minima))
        scale = scales * d[:, None]
        minimum = _best_minimum(sub, scale)
    round_weights(scale, minima * dmin[:, None])
    return SuperBlocks(d, scales, sub.rows(), dmin, minima)


def _best_minimum(sub: SubBlocks, scale: Floats) -> Floats:
    total, _, _ = sub.sums()
    minimum: Floats = (scale * total - sub.value_sum) * reciprocal(sub.weight_sum)
    return np.maximum(minimum, np.float32(0))


def _refit_steps(sub: SubBlocks, fit: SuperBlocks) -> tuple[Floats, Floats]:
    """The best d and dmin for the quants found: two least-squares equations per super-block."""
    total, square, along = sub.sums()
    scale_square = (fit.scales * fit.scales * square).sum(axis=1)
    cross = (fit.scales * fit.minima * total).sum(axis=1)
    minimum_square = (fit.minima * fit.minima * sub.weight_sum).sum(axis=1)
    scale_along = (fit.scales * along).sum(axis=1)
    minimum_along = (fit.minima * sub.value_sum).sum(axis=1)
    determinant = reciprocal(scale_square * minimum_square - cross * cross)
    d = (scale_along * minimum_square - minimum_along * cross) * determinant
    dmin = (scale_along * cross - minimum_along * scale_square) * determinant
    usable = (d > 0) & (dmin >= 0)
    return _refitted(d, usable, fit.d), _refitted(dmin, usable, fit.dmin)
