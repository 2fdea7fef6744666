"""A feed-forward of which few neurons are active, in numpy."""

import numpy as np

from edgeinfer_kernels.reference.blocks.feed_forward import activate
from edgeinfer_kernels.reference.step import Array, BlockStep


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): down(activation(max(0, gate - threshold)) · up)."""
    spec, w = step.spec, step.weights
    gate = step.times(h, w.ffn_gate)
    threshold = gate.mean(axis=1, keepdims=True) + spec.deviations * gate.std(axis=1, ddof=1, keepdims=True)
    hidden = activate(np.maximum(gate - threshold, 0), spec.activation) * step.times(h, w.ffn_up)
    return step.times(hidden, w.ffn_down)
