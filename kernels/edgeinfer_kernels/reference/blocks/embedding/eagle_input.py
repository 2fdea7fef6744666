"""The input of an EAGLE-3 head in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.draft_input import PAIR, STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes g, or norm(g). The pairs are stored."""
    spec, w = step.spec, step.weights
    if STATES in step.shared:
        states = normalize(step.shared[STATES].astype(h.dtype), spec.norm, w.feature_norm)
        g = step.times(states, w.fc)
    else:
        g = step.shared[OWN_STATES].astype(h.dtype)
    normed = normalize(g, spec.norm, w.hnorm)
    step.shared[PAIR] = np.concatenate([normalize(h, spec.norm, w.enorm), normed], axis=1)
    return np.asarray((normed if spec.norm_before_residual else g) - h)
