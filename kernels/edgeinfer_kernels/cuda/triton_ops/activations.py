"""The activation functions of feed-forward blocks and the gates of attention heads, for decode and prefill
kernels.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.blocks.feed_forward import (
    CLAMPED_SWIGLU_LIMIT,
    CLAMPED_SWIGLU_SLOPE,
    Activation,
    LimitedSwiglu,
)

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
RELU = tl.constexpr(2)
RELU_SQUARED = tl.constexpr(3)
CLAMPED_SWIGLU = tl.constexpr(4)
DRELU = tl.constexpr(5)
ACTIVATIONS = {
    "silu": SILU,
    "gelu": GELU,
    "relu": RELU,
    "relu_squared": RELU_SQUARED,
    "clamped_swiglu": CLAMPED_SWIGLU,
    "drelu": DRELU,
}
LIMITED_SWIGLU = tl.constexpr(1024)
"""The code of `LimitedSwiglu` is its limit plus this number."""
SLOPE = tl.constexpr(CLAMPED_SWIGLU_SLOPE)
LIMIT = tl.constexpr(CLAMPED_SWIGLU_LIMIT)


def activation_code(activation: Activation) -> float:
    """The code of an activation function for kernels."""
    if isinstance(activation, LimitedSwiglu):
        return int(LIMITED_SWIGLU) + activation.limit
    return int(ACTIVATIONS[activation])


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
    """activation(gate) · up; dReLU and clamped SwiGLU as defined in `blocks.feed_forward.Activation`."""
    if ACTIVATION == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-SLOPE * gate)) * (up + 1.0)
    elif ACTIVATION >= LIMITED_SWIGLU:
        limit: tl.constexpr = ACTIVATION - LIMITED_SWIGLU
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return tl.minimum(activate(gate, SILU), limit) * up
    elif ACTIVATION == DRELU:
        return tl.maximum(gate, 0.0) * tl.maximum(up, 0.0)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + eˣ)."""
    y = tl.exp(-tl.abs(x))
    small = y * (1.0 - y * (0.5 - y * (1.0 / 3.0)))
    return tl.maximum(x, 0.0) + tl.where(y < 1e-3, small, tl.log(1.0 + y))


@triton.jit
def apply_gates_kernel(
    values, queries, scales, stride, HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr, GATE_AT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """values (tokens, heads · HEAD_DIM) *= sigmoid(gate), or softplus, in place; program (token, head).

    `queries`: rows of `stride` elements, still to be multiplied by `scales` (tokens,). The gates of a head
    follow its query, or, if GATE_AT isn't 0, each head has one from there on. Reads at most 8 bytes per
    element, writes 4.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dimension = tl.arange(0, DIMENSIONS)
    mask = dimension < HEAD_DIM
    if GATE_AT == 0:
        gate_at = (2 * head + 1) * HEAD_DIM + dimension
    else:
        gate_at = GATE_AT + head + dimension * 0
    gate = tl.load(queries + token * stride + gate_at, mask=mask, other=0.0) * tl.load(scales + token)
    at = values + (token * tl.num_programs(1) + head) * HEAD_DIM + dimension
    factor = softplus(gate) if SOFTPLUS else sigmoid(gate)
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(at, value.to(values.dtype.element_ty), mask=mask)
