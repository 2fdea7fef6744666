"""Dense feed-forward in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.feed_forward import (
    CLAMPED_SWIGLU_LIMIT,
    CLAMPED_SWIGLU_SLOPE,
    Activation,
    FeedForwardWeights,
    LimitedSwiglu,
)
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """down(activation(gate(h)) · up(h)); without a gate down(activation(up(h)))."""
    w = step.weights
    if w.sub_norm is None:
        return dense(step, h, step.spec.activation, w)
    gate, up = step.times(h, w.ffn_gate) * w.gate_scale, step.times(h, w.ffn_up) * w.up_scale
    hidden = activate_gated(gate, up, step.spec.activation)
    return step.times(normalize(hidden, w.sub_norm.spec(step.spec.sub_norm), w.sub_norm.weight), w.ffn_down)


def dense(step: BlockStep, h: Array, activation: Activation, w: FeedForwardWeights) -> Array:
    """The formula of `forward`, also for one expert."""
    up = step.times(h, w.ffn_up, w.ffn_up_bias)
    if w.ffn_gate is None:
        hidden = activate(up, activation)
    else:
        hidden = activate_gated(step.times(h, w.ffn_gate, w.ffn_gate_bias), up, activation)
    return step.times(hidden, w.ffn_down, w.ffn_down_bias)


def activate(x: Array, activation: Activation) -> Array:
    """SiLU, GELU in its tanh form, ReLU, or ReLU squared."""
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if activation == "gelu":
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    positive = np.maximum(x, 0)
    return positive if activation == "relu" else positive * positive


def activate_gated(gate: Array, up: Array, activation: Activation) -> Array:
    """activation(gate) · up; dReLU and clamped SwiGLU as defined in `blocks.feed_forward`."""
    if isinstance(activation, LimitedSwiglu):
        limit = activation.limit
        return np.asarray(np.minimum(activate(gate, "silu"), limit) * np.clip(up, -limit, limit))
    if activation == "drelu":
        return np.maximum(gate, 0) * np.maximum(up, 0)
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate = np.minimum(gate, CLAMPED_SWIGLU_LIMIT)
    up = np.clip(up, -CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    return np.asarray(gate / (1 + np.exp(-CLAMPED_SWIGLU_SLOPE * gate)) * (up + 1))
