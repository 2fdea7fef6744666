"""The fused hidden states of a target in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes norm(W_fc · states)."""
    states = step.shared[STATES].astype(h.dtype)
    return np.asarray(normalize(step.times(states, step.weights.fc), step.spec.norm, step.weights.norm) - h)
