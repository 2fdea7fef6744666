"""Kimi Delta Attention in numpy."""

import numpy as np

from edgeinfer_kernels.reference.blocks.gated_delta_net import delta_rule
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, sigmoid, softplus


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): W_out (norm(o) · sigmoid(G₂ G₁ h)), where o are the results of the heads."""
    w = step.weights
    beta = sigmoid(step.times(h, w.beta))
    g = w.a * softplus(step.times(step.times(h, w.f1), w.f2) + w.dt)
    qkv = np.concatenate([step.times(h, part) for part in (w.q, w.k, w.v)], axis=1)
    normed = normalize(delta_rule(step, qkv, beta, g), step.spec.norm, w.norm).reshape(len(h), -1)
    return step.times(normed * sigmoid(step.times(step.times(h, w.g1), w.g2)), w.output)
