"""The kernels for norms and sums that cannot be fused into other kernels."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.activations import activate, activate_gated
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

NO_NORM = tl.constexpr(0)
RMS = tl.constexpr(1)
LAYER = tl.constexpr(2)
NORMS = {"rms": RMS, "layer": LAYER}


@triton.jit
def normed(
    x, mask, weight, bias, offsets, epsilon, WIDTH: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr
):
    """The norm of x (BLOCK,), 0 where masked, as in `reference.normalize`."""
    if NORM == NO_NORM:
        return x
    else:
        if NORM == LAYER:
            x = tl.where(mask, x - tl.sum(x, axis=0) / WIDTH, 0.0)
        y = x / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + epsilon)
        y = y * tl.load(weight + offsets, mask=mask, other=0.0)
        if BIAS:
            y = y + tl.load(bias + offsets, mask=mask, other=0.0)
        return y


@triton.jit
def whole_row(NORM: tl.constexpr):
    """The groups of sixteen columns of a row, (groups,), their columns, (groups, 16), and whether the row has
    them.
    """
    group = tl.arange(0, NORM.groups)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    return group, column, column < NORM.width


@triton.jit
def load_norm(norm, inside, column, BIAS: tl.constexpr):
    """The weight of a norm for whole rows, its bias if BIAS, and ε. They don't depend on other kernels: load
    them before the wait for producers.
    """
    weight = tl.load(norm.weight + column, mask=inside, other=0.0)
    bias = weight
    if BIAS:
        bias = tl.load(norm.bias + column, mask=inside, other=0.0)
    return weight, bias, norm.epsilon


@triton.jit
def normalized(value, loaded, inside, NORM: tl.constexpr, BIAS: tl.constexpr):
    """The norm of a whole row: (groups, 16) float32, rms or layer, times weight, plus bias; `loaded` is the
    result of `load_norm`.
    """
    WIDTH: tl.constexpr = NORM.width
    weight, bias, epsilon = loaded
    if NORM.is_layer_norm:
        mean = tl.sum(tl.sum(value, axis=1), axis=0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
    square = tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH
    value = value * tl.rsqrt(square + epsilon) * weight
    if BIAS:
        value += bias
    return value


@triton.jit
def add_norm_kernel(
    y, stride, x, scale, gain, post_norm, norm, out,
    NORM: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x += scale·post_norm(y) if NORM.adds, x *= gain if NORM.scales, then norm(x) as activations; one
    program per token, a whole row at once.

    For norms that cannot be fused into the next kernel: layer norms and post-norms. Without a sum y is x, or
    what it quantizes. Reads width·4 bytes of y and of x, writes x again and 12 words (44 with floats) per 32
    columns.
    """
    WIDTH: tl.constexpr = NORM.width
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group, column, inside = whole_row(NORM)
    if NORM.has_post_norm:
        post_norm_loaded = load_norm(post_norm, inside, column, False)
    if NORM.has_norm:
        norm_loaded = load_norm(norm, inside, column, NORM.has_bias)
    wait_for_producers(DEPENDENT)
    value = tl.load(y + token * stride + column, mask=inside, other=0.0)
    if NORM.has_post_norm:
        value = normalized(value, post_norm_loaded, inside, NORM, False)
    pointers = x + token * WIDTH + column
    if NORM.adds:
        value = tl.load(pointers, mask=inside, other=0.0) + scale * value
    if NORM.scales:
        value *= gain
    if NORM.adds or NORM.scales:
        tl.debug_barrier()  # As in `residual_kernel`.
        tl.store(pointers, value, mask=inside)
    if NORM.has_norm:
        value = normalized(value, norm_loaded, inside, NORM, NORM.has_bias)
    quantize(value, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def activation_norm_kernel(
    rows, stride, gate_at, gate_bias, up_bias, gate_scale, up_scale, norm, out,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """norm(activation(gate · scale + bias) · (up · scale + bias)) as activations; one program per token, a
    whole row at once.

    `rows` (tokens, stride): up, and the gate from gate_at on. Reads 8 bytes per column (4 without a gate),
    writes 12 words (44 with floats) per 32 columns.
    """
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group, column, inside = whole_row(NORM)
    loaded = load_norm(norm, inside, column, False)
    wait_for_producers(DEPENDENT)
    up = rows + token * stride + column
    value = tl.load(up, mask=inside, other=0.0) * up_scale
    if HAS_BIAS:
        value += tl.load(up_bias + column, mask=inside, other=0.0)
    if HAS_GATE:
        gate = tl.load(up + gate_at, mask=inside, other=0.0) * gate_scale
        if HAS_BIAS:
            gate += tl.load(gate_bias + column, mask=inside, other=0.0)
        value = activate_gated(gate, value, ACTIVATION)
    else:
        value = activate(value, ACTIVATION)
    value = normalized(value, loaded, inside, NORM, False)
    quantize(value, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def add_rows_kernel(x, y, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """y += x; both (tokens, stride) float32; program (token, columns). Reads stride · 8 bytes per token and
    writes stride · 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = tl.program_id(0) * stride + columns, columns < stride
    value = tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0)
    tl.store(y + at, value, mask=inside)


@triton.jit
def norm_in_place_kernel(
    x, norm, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x = norm(x); one program per token. Reads and writes WIDTH · 4 bytes."""
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    at = x + tl.program_id(0).to(tl.int64) * WIDTH + offsets
    value = tl.load(at, mask=mask, other=0.0)
    value = normed(value, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NORM, BIAS)
    tl.store(at, value, mask=mask)
