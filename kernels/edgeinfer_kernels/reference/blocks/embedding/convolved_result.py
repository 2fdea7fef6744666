"""The convolution after a block of a layer of a block drafter, in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.convolved_input import CONVOLVED, FACTORS, RESIDUAL
from edgeinfer_kernels.reference.blocks.embedding.convolved_input import AFTER, convolve
from edgeinfer_kernels.reference.step import Array, BlockStep


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes the residual sum."""
    added = step.x - step.shared[CONVOLVED]
    result = convolve(added, step.shared[FACTORS], step.weights.base, step.spec.convolution, AFTER)
    return np.asarray(step.shared[RESIDUAL] + result - step.x)
