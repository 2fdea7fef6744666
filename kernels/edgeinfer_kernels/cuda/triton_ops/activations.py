"""The activation functions of feed-forward blocks, for decode and prefill kernels."""

import triton
import triton.language as tl

from edgeinfer_kernels.blocks.feed_forward import CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_SLOPE

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
RELU = tl.constexpr(2)
RELU_SQUARED = tl.constexpr(3)
CLAMPED_SWIGLU = tl.constexpr(4)
ACTIVATIONS = {
    "silu": SILU,
    "gelu": GELU,
    "relu": RELU,
    "relu_squared": RELU_SQUARED,
    "clamped_swiglu": CLAMPED_SWIGLU,
}
SLOPE = tl.constexpr(CLAMPED_SWIGLU_SLOPE)
LIMIT = tl.constexpr(CLAMPED_SWIGLU_LIMIT)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU in its tanh form (x · sigmoid of twice the tanh argument), ReLU, or ReLU squared."""
    if ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        positive = tl.maximum(x, 0.0)
        if ACTIVATION == RELU_SQUARED:
            positive = positive * positive
        return positive


@triton.jit
def activate_gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) · up; clamped SwiGLU as defined in `specification.Activation`."""
    if ACTIVATION == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-SLOPE * gate)) * (up + 1.0)
    else:
        return activate(gate, ACTIVATION) * up
