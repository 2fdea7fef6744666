"""The input of a Gemma 4 assistant in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES
from edgeinfer_kernels.reference.step import Array, BlockStep


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes W_pre · [e; h]."""
    states = step.shared[STATES].astype(h.dtype)
    if OWN_STATES in step.shared:
        own = step.times(step.shared[OWN_STATES].astype(h.dtype), step.weights.post)
        states = np.concatenate([states, own], axis=1)
    return np.asarray(step.times(states, step.weights.pre) - h)
