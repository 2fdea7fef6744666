"""The convolution of a block of drafts in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.convolved_input import CONVOLVED, FACTORS, RESIDUAL, Convolution
from edgeinfer_kernels.matrix import Vector
from edgeinfer_kernels.reference.step import Array, BlockStep

BEFORE, AFTER = 0, 1


def convolve(rows: Array, factors: Array, base: Vector, convolution: Convolution, side: int) -> Array:
    """(tokens, hidden_size): the convolution of rows before or after the block of a layer."""
    (tokens, width), taps = rows.shape, convolution.taps
    own = factors.reshape(tokens, 2, taps, -1)[:, side]
    weights = np.repeat(own, convolution.group_size, axis=2) + base.reshape(2, taps, width)[side]
    result = np.zeros_like(rows)
    for tap in range(min(taps, tokens)):
        result[tap:] += weights[tap:, tap] * rows[: tokens - tap]
    return result


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes the convolution of h."""
    factors = step.times(h, step.weights.projection)
    convolved = convolve(h, factors, step.weights.base, step.spec.convolution, BEFORE)
    step.shared.update({FACTORS: factors, RESIDUAL: step.x.copy(), CONVOLVED: convolved})
    return np.asarray(convolved - step.x)
