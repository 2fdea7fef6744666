"""The kernel for norms that cannot be fused into other kernels."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def normalized(
    value, weight, bias, inside, column, epsilon, WIDTH: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr
):
    """The norm of a whole row: (groups, 16) float32, rms or layer, times weight, plus bias."""
    if LAYER:
        mean = tl.sum(tl.sum(value, axis=1), axis=0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
    square = tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH
    value = value * tl.rsqrt(square + epsilon) * tl.load(weight + column, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0)
    return value


@triton.jit
def join_kernel(
    y,
    stride,
    x,
    scale,
    post_weight,
    post_epsilon,
    weight,
    bias,
    epsilon,
    out,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLANES: tl.constexpr,
    ADDS: tl.constexpr,
    POST: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x += scale·post_norm(y) if ADDS, then norm(x) as activations; one program per token, a whole row at
    once.

    For norms that cannot be fused into the next kernel: layer norms and post-norms. Without x (ADDS 0) it
    quantizes y. GROUPS·16 columns cover the width. Reads WIDTH·4 bytes of y and of x, writes x again and 12
    words (44 with floats) per 32 columns.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    value = tl.load(y + token * stride + column, mask=inside, other=0.0)
    if POST:
        value = normalized(value, post_weight, bias, inside, column, post_epsilon, WIDTH, LAYER, False)
    if ADDS:
        pointers = x + token * WIDTH + column
        value = tl.load(pointers, mask=inside, other=0.0) + scale * value
        tl.debug_barrier()  # As in `residual_kernel`.
        tl.store(pointers, value, mask=inside)
    if NORM:
        value = normalized(value, weight, bias, inside, column, epsilon, WIDTH, LAYER, BIAS)
    target = out + token * (PLANES * BLOCKS)
    quantize(value, target, group, group < 2 * BLOCKS, BLOCKS, PLANES)
