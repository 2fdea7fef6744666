"""Laurel in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.gemma3n.laurel import SUM_SCALE
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes the scaled sum."""
    w = step.weights
    projected = normalize(step.times(step.times(h, w.left), w.right), step.spec.norm, w.post_norm)
    return np.asarray(SUM_SCALE * (step.x + h + projected) - step.x)
