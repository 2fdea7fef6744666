"""The activation functions of feed-forward blocks, for kernels of steps and of prompts."""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
RELU = tl.constexpr(2)
RELU_SQUARED = tl.constexpr(3)
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "relu": RELU, "relu_squared": RELU_SQUARED}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU, GELU in its tanh form (x · sigmoid of twice what the tanh takes), ReLU, or ReLU squared."""
    if ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        positive = tl.maximum(x, 0.0)
        if ACTIVATION == RELU_SQUARED:
            positive = positive * positive
        return positive
