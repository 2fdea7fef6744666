"""The input of a draft head in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes the projection of the pair."""
    norm, w = step.spec.norm, step.weights
    states = step.shared[STATES].astype(h.dtype)
    pair = np.concatenate([normalize(h, norm, w.enorm), normalize(states, norm, w.hnorm)], axis=1)
    return step.times(pair, w.eh_proj) - h
