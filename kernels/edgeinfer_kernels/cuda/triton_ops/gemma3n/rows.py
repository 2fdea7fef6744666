"""What the kernels of Gemma 3n do with pieces of rows, and the kernel of Laurel's sum."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def sixteens(value):
    """The piece of program 0's axis as groups of sixteen, (groups, 16), and their indices in the row."""
    GROUPS: tl.constexpr = value.shape[0] // 16
    return tl.reshape(value, (GROUPS, 16)), tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)


@triton.jit
def store_input(x, following, token, WIDTH: tl.constexpr, GAIN: tl.constexpr, OUT: tl.constexpr):
    """Store a piece of x as the next block's input: x·gain as activations, and Σ x² of each group."""
    COUNT: tl.constexpr = (WIDTH + 15) // 16
    values, group = sixteens(x)
    sums = following.sums + token * COUNT + group
    tl.store(sums, tl.sum(values * values, axis=1), mask=group < COUNT)
    if GAIN:
        column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        values *= tl.load(following.gain + column, mask=column < WIDTH, other=0.0)
    quantize(values, following.words + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def _inverse_rms(row, scale, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """1/√(mean + ε) of the squares of a row times `scale`."""
    offsets = tl.arange(0, BLOCK)
    value = tl.load(row + offsets, mask=offsets < WIDTH, other=0.0) * scale
    return tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + epsilon)


@triton.jit
def laurel_kernel(
    x, before, norm, y, stride, row_scales, post_norm, scale, following,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, SCALED: tl.constexpr,
    GAIN: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x (tokens, WIDTH) = scale · (x + norm(before) + post_norm(y)), which is also stored as the next input
    unless OUT is None; program (piece, token).

    `before` (tokens, WIDTH): x before attention. With SCALED y (tokens, stride) is still to be multiplied by
    `row_scales`. A token reads and writes WIDTH · 4 bytes of x; each of its programs reads y and `before`.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    row, product = before + token * WIDTH, y + token * stride
    row_scale = tl.load(row_scales + token) if SCALED else 1.0
    inverse = _inverse_rms(row, 1.0, norm.epsilon, WIDTH, BLOCK)
    product_inverse = _inverse_rms(product, row_scale, post_norm.epsilon, WIDTH, BLOCK) * row_scale
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < WIDTH
    at = x + token * WIDTH + column
    h = tl.load(row + column, mask=inside, other=0.0) * inverse
    h *= tl.load(norm.weight + column, mask=inside, other=0.0)
    projected = tl.load(product + column, mask=inside, other=0.0) * product_inverse
    projected *= tl.load(post_norm.weight + column, mask=inside, other=0.0)
    value = scale * (tl.load(at, mask=inside, other=0.0) + h + projected)
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(at, value, mask=inside)
    if OUT is not None:
        store_input(value, following, token, WIDTH, GAIN, OUT)
