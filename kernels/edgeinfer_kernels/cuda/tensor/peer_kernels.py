"""A sum over the ranks of tensor parallel, in the kernel that adds a result to x and normalizes it."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.tensor.peer_columns import meet
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import load_norm, normalized
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def sum_norm_kernel(
    peers, stride, x, scale, post_norm, norm, out,
    NORM: tl.constexpr, OUT: tl.constexpr, POLLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x += scale·post_norm(Σ rows of all ranks), then norm(x) as activations; one program per token, a whole
    row at once. The sums are in the order of the ranks, so that all have the same bits.

    Reads width·4 bytes of each rank's rows and of x, writes x again and 12 words (44 with floats) per 32
    columns. The next sum has other rows: these are written again only after the next one, when all ranks have
    read them.
    """
    WIDTH: tl.constexpr = NORM.width
    BLOCKS: tl.constexpr = OUT.blocks
    RANKS: tl.constexpr = len(peers.rows)
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group = tl.arange(0, NORM.groups)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    if NORM.has_post_norm:
        post_norm_loaded = load_norm(post_norm, inside, column, False)
    if NORM.has_norm:
        norm_loaded = load_norm(norm, inside, column, NORM.has_bias)
    wait_for_producers(DEPENDENT)
    meet(peers, token, POLLS)
    at = token * stride + column
    value = tl.load(peers.rows[0] + at, mask=inside, other=0.0)
    for other in tl.static_range(1, RANKS):
        value += tl.load(peers.rows[other] + at, mask=inside, other=0.0)
    if NORM.has_post_norm:
        value = normalized(value, post_norm_loaded, inside, NORM, False)
    pointers = x + token * WIDTH + column
    value = tl.load(pointers, mask=inside, other=0.0) + scale * value
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(pointers, value, mask=inside)
    if NORM.has_norm:
        value = normalized(value, norm_loaded, inside, NORM, NORM.has_bias)
    target = out + token * (OUT.planes * BLOCKS)
    quantize(value, target, group, group < 2 * BLOCKS, OUT)
